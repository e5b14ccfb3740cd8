"""What a round is, top to bottom; and all that a run remembers between two of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from fedlens import keys
from fedlens.algorithm import Algorithm
from fedlens.by_client import ByClient
from fedlens.client import CHANNEL, ClientProgram
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
from fedlens.network.network import Network
from fedlens.slots import ChannelStep
from fedlens.trees import converted, copy_tensors, moved, stack
from fedlens.uploads import Uploads
from fedlens.work import Part, Shared, Work

SELECT, CLIENT, DRAW = keys.purpose("select"), keys.purpose("client"), keys.purpose("draw")


@dataclass(frozen=True)
class ClientMemory:
    """What clients remember, by client. One that was never seen costs nothing."""

    rows: Mapping[int, Memory] = field(default_factory=ByClient)
    num_examples: int = 0  # held by these clients together, each when it was first seen

    def __post_init__(self) -> None:
        if not isinstance(self.rows, ByClient):  # from a checkpoint
            object.__setattr__(self, "rows", ByClient(self.rows))

    def take(self, clients: Tensor, first: Callable[[], Memory]) -> list[Memory]:
        """The memory of each of these; `first` gives that of a client never seen."""
        listed = clients.tolist()
        new = {} if all(client in self.rows for client in listed) else first()
        return [self.rows.get(client, new) for client in listed]

    def put(self, clients: Tensor, keep: Sequence[Memory], sizes: Tensor) -> ClientMemory:
        if not any(keep):
            return self
        assert isinstance(self.rows, ByClient)
        rows = self.rows.changed(dict(zip(clients.tolist(), keep, strict=True)))
        return ClientMemory(rows, self.num_examples_with(clients, sizes))

    def num_examples_with(self, clients: Tensor, sizes: Tensor) -> int:
        """How many examples are held by the clients seen so far and by these."""
        seen = dict(zip(clients.tolist(), sizes.tolist(), strict=True))
        new: int = sum(size for client, size in seen.items() if client not in self.rows)
        return self.num_examples + new


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
    clients: Sequence[int]  # who took part; one that was drawn twice stands here twice
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


@dataclass(frozen=True)
class RoundInput:
    """An experiment's part in a round: where it stands, and who and what it is run with."""

    program: ClientProgram
    federation: Federation
    state: State
    seed: int


def run_round(
    program: ClientProgram, federation: Federation, engine: Engine, state: State, seed: int
) -> tuple[State, Outcome]:
    """One round. The state that comes in stays as it was."""
    (after,) = run_rounds(program, engine, [RoundInput(program, federation, state, seed)])
    return after


def run_rounds(
    program: ClientProgram, engine: Engine, experiments: Sequence[RoundInput]
) -> list[tuple[State, Outcome]]:
    """A round of each of G experiments, whose clients the engine trains as one cohort.

    `program` is their programs as one, see `ClientProgram.joint`.
    """
    states = [one.state for one in experiments]
    params, buffers, told = (
        stack([getattr(state, part) for state in states]) for part in ("params", "buffers", "told")
    )
    floats = {name: t for name, t in (params | buffers).items() if t.is_floating_point()}
    exact = converted(floats, torch.float64)  # also if it is that: the server moves it in place
    shared = Shared(params, buffers, exact, told)
    works = _prepare(experiments)
    uploads = [Uploads() for _ in experiments]
    for part in engine.map(program, shared, Work.joint(works)):
        uploads[part.group].add(part)
    return [
        _move(one, works[g], uploads[g].whole(), {n: t[g : g + 1] for n, t in exact.items()})
        for g, one in enumerate(experiments)
    ]


def _prepare(experiments: Sequence[RoundInput]) -> list[Work]:
    """What each client that takes part in a round has to do, for each experiment."""
    selected = [_select(one) for one in experiments]
    draws = [one.program.algorithm.draw for one in experiments]
    draw, several = draws[0], len(experiments) > 1
    if several and draw.by_client and all(one == draw for one in draws):
        holdings = Holdings.joined([one.holdings for one in selected])
        whole = draw(holdings, keys.fold(torch.cat([one.keys for one in selected]), DRAW))
        ends = list(accumulate(len(one.clients) for one in selected))
        rows = [slice(first, end) for first, end in pairwise([0, *ends])]
        plans = [Plan(whole.index[some], whole.counts[some]) for some in rows]
    else:
        plans = [
            its(one.holdings, keys.fold(one.keys, DRAW))
            for its, one in zip(draws, selected, strict=True)
        ]
    return [_work(*each) for each in zip(experiments, selected, plans, strict=True)]


class Selected(NamedTuple):
    """The clients that take part in an experiment's round."""

    clients: Tensor  # [C]
    keys: Tensor  # [C]
    holdings: Holdings


def _select(experiment: RoundInput) -> Selected:
    federation, round = experiment.federation, experiment.state.round
    key = keys.root(experiment.seed, SELECT, round)
    clients = experiment.program.algorithm.select(federation, round, key)
    own = keys.fold(keys.root(experiment.seed, CLIENT, round), clients, _occurrences(clients))
    return Selected(clients, own, federation.holdings(round, clients))


def _work(experiment: RoundInput, selected: Selected, plan: Plan) -> Work:
    algorithm, federation = experiment.program.algorithm, experiment.federation
    state = experiment.state
    clients, client_keys, holdings = selected
    counts = federation.label_counts(holdings)
    cohort = _cohort(algorithm, federation, state, clients, holdings, plan, counts)
    first = partial(experiment.program.memory, state.params, state.buffers, state.told)
    return Work(
        plan=plan,
        keys=client_keys,
        facts=Facts(holdings.sizes, counts),
        memory=state.clients.take(clients, first),
        shares=algorithm.weigh(cohort).double(),
        cohort=cohort,
        cohort_sizes=(len(clients),),
    )


def _move(experiment: RoundInput, work: Work, uploads: Part, exact: Tree) -> tuple[State, Outcome]:
    """The server's half of an experiment's round; `exact` is its model [1, ...] in float64."""
    algorithm, state = experiment.program.algorithm, experiment.state
    cohort, device = work.cohort, next(iter(state.params.values())).device
    update = uploads.update
    if not uploads.combined:
        # Moved in one go: each single copy of its own would wait for all that is under way.
        shares, there = moved((work.shares, cohort), device)
        update = algorithm.combine(update, shares, there, experiment.program.layout)
    key = keys.root(experiment.seed, CHANNEL, state.round)
    for number, step in reversed(list(enumerate(algorithm.channel))):
        update = step.decode(update, keys.fold(key, number), cohort)
    gathered = Gathered(cohort, uploads.extra)

    # Not in place: the update may lie where the next round's will, and a server may keep its grads.
    negative = torch._foreach_neg([update[name].unsqueeze(0) for name in state.params])
    grads = dict(zip(state.params, negative, strict=True))
    memory = {name: tree_map(torch.clone, tree) for name, tree in state.server.items()}
    start = {name: exact[name] for name in state.params}
    new, server = algorithm.advance.update(grads, memory, start, gathered)
    params = tree_map(torch.empty_like, state.params)
    copy_tensors({name: new[name].squeeze(0) for name in params}, params)
    buffers = {
        name: (exact[name].squeeze(0) + update[name]).to(b.dtype)
        if b.is_floating_point()
        else torch.maximum(b, uploads.counters[name])
        for name, b in state.buffers.items()
    }
    model = state.params | state.buffers
    by_size = moved(cohort.size_shares, device)
    means = {name: (t.double() * by_size).sum() for name, t in uploads.scalars.items()}
    means |= {name: t.double().mean() for name, t in uploads.channel_scalars.items()}
    for measure in algorithm.measures:
        means |= measure(state.params, params)
    outcome = Outcome(
        train_loss=means.pop("loss"),
        batches=int(work.plan.steps.max()) if len(work) else 0,
        examples=int(work.plan.counts.sum()),
        clients=cohort.clients.tolist(),
        bytes_up=(_sent(model, algorithm.channel) + _extra(uploads.extra)) * len(work),
        bytes_down=(_sent(model) + _extra(state.told)) * len(work),
        scalars=means,
    )
    told = state.told
    for tell in algorithm.tell:
        told = told | tell.update(told, gathered)
    kept = state.clients.put(cohort.clients, uploads.keep, cohort.sizes)
    return State(state.round + 1, params, buffers, server, told, kept), outcome


def _sent(tree: Tree, channel: Sequence[ChannelStep] = ()) -> int:
    """The bytes of a tree on its way; float64 is the server's own affair, clients send float32."""
    total = 0
    for tensor in tree.values():
        if not tensor.is_floating_point():
            total += tensor.nbytes
            continue
        bits = 8 * tensor.numel() * min(tensor.element_size(), 4)
        for step in channel:
            bits = step.num_bits(tensor.numel(), bits)
        total += -(-bits // 8)
    return total


def _extra(memory: Memory) -> int:
    return sum(map(_sent, memory.values()))


def _cohort(
    algorithm: Algorithm,
    federation: Federation,
    state: State,
    clients: Tensor,
    holdings: Holdings,
    plan: Plan,
    counts: Tensor,
) -> Cohort:
    sizes = holdings.sizes.double()
    size_shares = sizes / sizes.sum().clamp(min=1)
    label_shares = None
    if "label_counts" in algorithm.discloses:
        totals = counts.sum(0)
        shares = counts.double() / totals.clamp(min=1)
        label_shares = torch.where(totals > 0, shares, size_shares[:, None])
    total = int(holdings.sizes.sum())
    if algorithm.weigh.over == "seen":
        total = state.clients.num_examples_with(clients, holdings.sizes)
    elif algorithm.weigh.over == "population":
        total = federation.num_examples(state.round)
    return Cohort(
        clients=clients,
        sizes=holdings.sizes,
        steps=plan.steps,
        size_shares=size_shares,
        label_shares=label_shares,
        num_clients=federation.num_clients,
        num_examples=total,
    )


def _occurrences(clients: Tensor) -> Tensor:
    """How often each client already stood in the cohort: 0, or more if it is drawn again."""
    listed = clients.tolist()
    if len(set(listed)) == len(listed):
        return torch.zeros_like(clients)
    seen: Counter[int] = Counter()
    before = []
    for client in listed:
        before.append(seen[client])
        seen[client] += 1
    return torch.tensor(before)
