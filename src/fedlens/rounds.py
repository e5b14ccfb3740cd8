"""What a round is, top to bottom; and all that a run remembers between two of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from fedlens import keys
from fedlens.algorithm import Algorithm
from fedlens.client import ClientProgram, Part, Shared, Work
from fedlens.core import (
    Cohort,
    Facts,
    Federation,
    Gathered,
    Holdings,
    Memory,
    Plan,
    Tree,
    tree_map,
)
from fedlens.engines import Engine
from fedlens.network import Network

SELECT, CLIENT, DRAW = keys.purpose("select"), keys.purpose("client"), keys.purpose("draw")


@dataclass(frozen=True)
class ClientMemory:
    """What clients remember, by client. One that was never seen costs nothing."""

    rows: Mapping[int, Memory] = field(default_factory=dict)

    def take(self, clients: Tensor, first: Memory) -> Memory:  # [C, ...]
        """These clients' memory, stacked; `first` is that of a client never seen."""
        found = [self.rows.get(client, first) for client in clients.tolist()]
        return {
            name: {
                key: torch.stack([row[name][key].to(t) for row in found]) for key, t in tree.items()
            }
            for name, tree in first.items()
        }

    def put(self, clients: Tensor, keep: Memory) -> ClientMemory:
        if not keep:
            return self
        new = {
            client: {
                name: {key: t[row].cpu().clone() for key, t in tree.items()}
                for name, tree in keep.items()
            }
            for row, client in enumerate(clients.tolist())
        }
        return ClientMemory({**self.rows, **new})


@dataclass(frozen=True)
class State:
    """All that a run remembers between rounds, and all that a checkpoint holds."""

    round: int
    params: Tree
    buffers: Tree
    server: Memory  # [1, ...] what `advance` remembers
    told: Memory  # what the server tells besides the model
    clients: ClientMemory


class Outcome(NamedTuple):
    """What a round did, for the record."""

    train_loss: Tensor  # of local training, the mean over examples
    batches: int  # of the client that took the most
    examples: int  # processed by all clients together
    bytes_up: int
    bytes_down: int
    scalars: Mapping[str, Tensor]  # what the algorithm measured


def begin(
    network: Network, program: ClientProgram, federation: Federation, device: torch.device
) -> State:
    params = {name: p.to(device) for name, p in network.params.items()}
    buffers = {name: b.to(device) for name, b in network.buffers.items()}
    server = program.algorithm.advance.init({n: p.double()[None] for n, p in params.items()})
    told: Memory = {}
    for tell in program.algorithm.tell:
        told |= tell.init(params, federation)
    return State(0, params, buffers, server, told, ClientMemory())


def run_round(
    program: ClientProgram, federation: Federation, engine: Engine, state: State, seed: int
) -> tuple[State, Outcome]:
    """One round. The state that comes in stays as it was."""
    algorithm, root = program.algorithm, keys.root(seed)
    device = next(iter(state.params.values())).device

    clients = algorithm.select(federation, state.round, keys.fold(root, SELECT, state.round))
    client_keys = keys.fold(root, CLIENT, state.round, clients, _occurrences(clients))
    holdings = federation.holdings(state.round, clients)
    plan = algorithm.draw(holdings, keys.fold(client_keys, DRAW))

    counts = federation.label_counts(holdings)
    cohort = _cohort(algorithm, federation, state, clients, holdings, plan, counts)
    shares = algorithm.weigh(cohort)
    first = program.memory(state.params, state.buffers, state.told)
    work = Work(
        plan=plan,
        keys=client_keys,
        facts=Facts(holdings.sizes, counts),
        memory=state.clients.take(clients, first),
        shares=shares,
        cohort=cohort,
    )
    model = state.params | state.buffers
    exact = {
        name: t.to(torch.float64, copy=True)  # a copy, since the server moves it in place
        for name, t in model.items()
        if t.is_floating_point()
    }
    shared = Shared(state.params, state.buffers, exact, state.told)
    update, counters, extra, keep, scalars = _gather(engine.map(program, shared, work), program)
    gathered = Gathered(cohort, extra)
    if not algorithm.combine.linear:
        update = algorithm.combine(update, shares.to(device), cohort, program.layout)

    # The server moves in float64, with a leading axis for the experiments of a sweep.
    slope = {name: update[name].neg_().unsqueeze(0) for name in state.params}
    memory = {name: tree_map(torch.clone, tree) for name, tree in state.server.items()}
    start = {name: exact[name].unsqueeze(0) for name in state.params}
    moved, server = algorithm.advance.update(slope, memory, start, gathered)
    params = {name: moved[name].squeeze(0).to(p.dtype) for name, p in state.params.items()}
    buffers = {
        name: (exact[name] + update[name]).to(b.dtype)
        if b.is_floating_point()
        else torch.maximum(b, counters[name])
        for name, b in state.buffers.items()
    }
    down = _bytes(model) + sum(map(_bytes, state.told.values()))
    up = _bytes(model) + sum(map(_bytes, extra.values()))
    by_size = cohort.size_shares.to(device)
    means = {name: (t.double() * by_size).sum() for name, t in scalars.items()}
    for measure in algorithm.measures:
        means |= measure(state.params, params)
    outcome = Outcome(
        train_loss=means.pop("loss"),
        batches=int(plan.steps.max()) if len(clients) else 0,
        examples=int(plan.counts.sum()),
        bytes_up=up * len(clients),
        bytes_down=down * len(clients),
        scalars=means,
    )
    told = state.told
    for tell in algorithm.tell:
        told = told | tell.update(told, gathered)
    kept = state.clients.put(clients, keep)
    return State(state.round + 1, params, buffers, server, told, kept), outcome


def _bytes(tree: Tree) -> int:
    """What a tree weighs on the wire; float64 is the server's own affair, clients send float32."""
    return sum(
        t.numel() * min(t.element_size(), 4 if t.is_floating_point() else 8) for t in tree.values()
    )


def _cohort(
    algorithm: Algorithm,
    federation: Federation,
    state: State,
    clients: Tensor,
    holdings: Holdings,
    plan: Plan,
    counts: Tensor,
) -> Cohort:
    everyone = federation.everyone(state.round)
    sizes = holdings.sizes.double()
    size_shares = sizes / sizes.sum().clamp(min=1)
    label_shares = None
    if "label_counts" in algorithm.discloses:
        totals = counts.sum(0)
        shares = counts.double() / totals.clamp(min=1)
        label_shares = torch.where(totals > 0, shares, size_shares[:, None])
    seen = torch.tensor(list({*state.clients.rows, *clients.tolist()}))
    return Cohort(
        clients=clients,
        sizes=holdings.sizes,
        steps=plan.steps,
        size_shares=size_shares,
        label_shares=label_shares,
        num_clients=federation.num_clients,
        num_examples=int(everyone.offsets[-1]),
        num_examples_seen=int(everyone.sizes[seen].sum()),
    )


def _gather(parts: Iterable[Part], program: ClientProgram) -> Part:
    """All parts of a cohort as one, added up in cohort order as they arrive."""
    linear = program.algorithm.combine.linear
    update: Tree = {}
    counters: Tree = {}
    extra: Memory = {}
    rest: list[Part] = []
    for part in parts:
        if linear:
            update = _added(update, part.update)
        for name, tree in part.extra.items():
            extra[name] = _added(extra.get(name, {}), tree)
        for name, count in part.counters.items():
            counters[name] = torch.maximum(counters.get(name, count), count)
        rest.append(part._replace(update={} if linear else part.update))
    if not linear:
        update = _join([part.update for part in rest])
    keep = {name: _join([part.keep[name] for part in rest]) for name in rest[0].keep}
    return Part(update, counters, extra, keep, _join([dict(part.scalars) for part in rest]))


def _added(total: Tree, part: Tree) -> Tree:
    """`total` plus `part`, in the place of `total`; a part may lie in memory that is reused."""
    if not total:
        return tree_map(torch.clone, part)
    for name, tensor in total.items():
        tensor += part[name]
    return total


def _join(trees: list[Tree]) -> Tree:
    return {name: torch.cat([tree[name] for tree in trees]) for name in trees[0]}


def _occurrences(clients: Tensor) -> Tensor:
    """How often each client already stood in the cohort: 0, or more if it is drawn again."""
    seen: Counter[int] = Counter()
    before = []
    for client in clients.tolist():
        before.append(seen[client])
        seen[client] += 1
    return torch.tensor(before)
