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
from fedlens.client import ClientProgram
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
from fedlens.trees import converted, copy_tensors, moved, stack
from fedlens.uploads import Uploads
from fedlens.work import Part, Shared, Work

SELECT, CLIENT, DRAW = keys.purpose("select"), keys.purpose("client"), keys.purpose("draw")


@dataclass(frozen=True)
class ClientMemory:
    """What clients remember, by client. One that was never seen costs nothing."""

    rows: Mapping[int, Memory] = field(default_factory=dict)

    def take(self, clients: Tensor, first: Callable[[], Memory]) -> list[Memory]:
        """The memory of each of these; `first` gives that of a client never seen."""
        listed = clients.tolist()
        new = {} if all(client in self.rows for client in listed) else first()
        return [self.rows.get(client, new) for client in listed]

    def put(self, clients: Tensor, keep: Sequence[Memory]) -> ClientMemory:
        if not any(keep):
            return self
        return ClientMemory({**self.rows, **dict(zip(clients.tolist(), keep, strict=True))})


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
    together: ClientProgram, engine: Engine, turns: Sequence[RoundInput]
) -> list[tuple[State, Outcome]]:
    """A round of each of G experiments, whose clients the engine trains as one cohort.

    `together` is their programs as one, see `ClientProgram.joint`.
    """
    states = [turn.state for turn in turns]
    params, buffers, told = (
        stack([getattr(state, part) for state in states]) for part in ("params", "buffers", "told")
    )
    floats = {name: t for name, t in (params | buffers).items() if t.is_floating_point()}
    exact = converted(floats, torch.float64)  # also if it is that: the server moves it in place
    shared = Shared(params, buffers, exact, told)
    works = _prepare(turns)
    uploads = [Uploads() for _ in turns]
    for part in engine.map(together, shared, Work.joint(works)):
        uploads[part.group].add(part)
    return [
        _move(turn, works[g], uploads[g].whole(), {n: t[g : g + 1] for n, t in exact.items()})
        for g, turn in enumerate(turns)
    ]


def _prepare(turns: Sequence[RoundInput]) -> list[Work]:
    """What each client that takes part in a round has to do, for each experiment."""
    called = [_called(turn) for turn in turns]
    draws = [turn.program.algorithm.draw for turn in turns]
    draw, several = draws[0], len(turns) > 1
    if several and getattr(draw, "by_client", False) and all(one == draw for one in draws):
        holdings = Holdings.joined([one.holdings for one in called])
        whole = draw(holdings, keys.fold(torch.cat([one.keys for one in called]), DRAW))
        ends = list(accumulate(len(one.clients) for one in called))
        rows = [slice(first, end) for first, end in pairwise([0, *ends])]
        plans = [Plan(whole.index[some], whole.counts[some]) for some in rows]
    else:
        plans = [
            its(one.holdings, keys.fold(one.keys, DRAW))
            for its, one in zip(draws, called, strict=True)
        ]
    return [_work(*each) for each in zip(turns, called, plans, strict=True)]


class Called(NamedTuple):
    """The clients that take part in an experiment's round."""

    clients: Tensor  # [C]
    keys: Tensor  # [C]
    holdings: Holdings


def _called(turn: RoundInput) -> Called:
    federation, round = turn.federation, turn.state.round
    key = keys.root(turn.seed, SELECT, round)
    clients = turn.program.algorithm.select(federation, round, key)
    own = keys.fold(keys.root(turn.seed, CLIENT, round), clients, _occurrences(clients))
    return Called(clients, own, federation.holdings(round, clients))


def _work(turn: RoundInput, called: Called, plan: Plan) -> Work:
    algorithm, federation, state = turn.program.algorithm, turn.federation, turn.state
    clients, client_keys, holdings = called
    counts = federation.label_counts(holdings)
    cohort = _cohort(algorithm, federation, state, clients, holdings, plan, counts)
    first = partial(turn.program.memory, state.params, state.buffers, state.told)
    return Work(
        plan=plan,
        keys=client_keys,
        facts=Facts(holdings.sizes, counts),
        memory=state.clients.take(clients, first),
        shares=algorithm.weigh(cohort).double(),
        cohort=cohort,
        cohort_sizes=(len(clients),),
    )


def _move(turn: RoundInput, work: Work, uploads: Part, exact: Tree) -> tuple[State, Outcome]:
    """The server's half of an experiment's round; `exact` is its model [1, ...] in float64."""
    algorithm, state = turn.program.algorithm, turn.state
    cohort, device = work.cohort, next(iter(state.params.values())).device
    update = uploads.update
    if not uploads.combined:
        # Moved in one go: each single copy of its own would wait for all that is under way.
        shares, there = moved((work.shares, cohort), device)
        update = algorithm.combine(update, shares, there, turn.program.layout)
    gathered = Gathered(cohort, uploads.extra)

    # Not in place: the update may lie where the next round's will, and a server may keep its slope.
    slopes = torch._foreach_neg([update[name].unsqueeze(0) for name in state.params])
    slope = dict(zip(state.params, slopes, strict=True))
    memory = {name: tree_map(torch.clone, tree) for name, tree in state.server.items()}
    start = {name: exact[name] for name in state.params}
    new, server = algorithm.advance.update(slope, memory, start, gathered)
    params = tree_map(torch.empty_like, state.params)
    copy_tensors({name: new[name].squeeze(0) for name in params}, params)
    buffers = {
        name: (exact[name].squeeze(0) + update[name]).to(b.dtype)
        if b.is_floating_point()
        else torch.maximum(b, uploads.counters[name])
        for name, b in state.buffers.items()
    }
    model = _bytes(state.params | state.buffers)
    by_size = moved(cohort.size_shares, device)
    means = {name: (t.double() * by_size).sum() for name, t in uploads.scalars.items()}
    for measure in algorithm.measures:
        means |= measure(state.params, params)
    outcome = Outcome(
        train_loss=means.pop("loss"),
        batches=int(work.plan.steps.max()) if len(work) else 0,
        examples=int(work.plan.counts.sum()),
        clients=cohort.clients.tolist(),
        bytes_up=(model + sum(map(_bytes, uploads.extra.values()))) * len(work),
        bytes_down=(model + sum(map(_bytes, state.told.values()))) * len(work),
        scalars=means,
    )
    told = state.told
    for tell in algorithm.tell:
        told = told | tell.update(told, gathered)
    kept = state.clients.put(cohort.clients, uploads.keep)
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
