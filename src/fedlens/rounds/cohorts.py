"""Which clients take part in a round: some are asked to train, and some of these report."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from fedlens.algorithm import Algorithm, same
from fedlens.core import Plan, Tree, keys
from fedlens.core.federation import Federation, Holdings
from fedlens.rounds.reports import REJECTED, Clock, End, Reporting

SELECT, CLIENT, DRAW = keys.purpose("select"), keys.purpose("client"), keys.purpose("draw")
ATTEMPT = keys.purpose("attempt")


class Asked(NamedTuple):
    """Clients that are asked to train, with their examples and batches."""

    clients: Tensor  # [C]
    keys: Tensor  # [C]
    holdings: Holdings
    plan: Plan

    def rows(self, which: Sequence[int]) -> Asked:
        if list(which) == list(range(len(self.clients))):
            return self
        rows = torch.tensor(which, dtype=torch.int64)
        plan = Plan(self.plan.index[rows], self.plan.counts[rows])
        return Asked(self.clients[rows], self.keys[rows], self.holdings.take(rows), plan)


class Started(NamedTuple):
    """A client that trains while the server continues, in asynchronous rounds."""

    client: int
    version: int  # the round whose model it has
    number: int  # the wave of that round in which it started
    end: End


@dataclass(frozen=True)
class Reports:
    """The clients whose updates a round uses, and the outcomes of the others that were asked."""

    reported: Asked
    failed: Mapping[str, Sequence[int]] = field(default_factory=dict)  # clients, by outcome
    time: float = 0.0  # on the virtual clock, at the end of the round
    attempts: int = 1
    num_trained: int = 1  # how many times clients have trained for it
    arrived: tuple[Started, ...] = ()  # those that reported, in an asynchronous round
    in_training: Tree = field(default_factory=dict)  # see `Asynchronous`
    num_waves: int = 0  # in which clients were started so far

    @property
    def num_sent_down(self) -> int:
        """How many clients were sent the model."""
        never = sum(len(self.failed.get(name, ())) for name in ("unavailable", "absent"))
        return len(self.reported.clients) + sum(map(len, self.failed.values())) - never

    @property
    def num_sent_up(self) -> int:
        """How many clients sent something, accepted or rejected."""
        refused = sum(len(self.failed.get(name, ())) for name in REJECTED)
        return len(self.reported.clients) + refused


class BelowQuorum(Exception):
    """Too few clients reported. `experiment` is the number of the experiment, if several run.

    `reports` has the outcomes of all clients that were asked: those that reported are `surplus`.
    """

    experiment = 0

    def __init__(self, why: str, reports: Reports) -> None:
        super().__init__(why)
        self.reports = reports


@dataclass(frozen=True)
class Call:
    """All inputs that decide which clients take part in a round."""

    algorithm: Algorithm
    federation: Federation
    seed: int
    round: int
    clock: Clock | None = None
    time: float = 0.0
    in_training: Tree = field(default_factory=dict)
    elsewhere: Reporting | None = None  # the rules for waiting for real clients at sites

    def select(self, count: int | None = None, *again: int) -> Tensor:  # [C]
        """Select `count` clients, or the algorithm's own number; `again` makes another draw."""
        key = keys.root(self.seed, SELECT, self.round)
        chosen = self.algorithm.select if count is None else self.algorithm.select.of_size(count)
        return chosen(self.federation, self.round, keys.fold(key, *again))

    def keys(self, clients: Tensor, numbers: Tensor) -> Tensor:  # [C]
        """The random key of each client; `numbers` tell apart its trainings in this round."""
        root = keys.root(self.seed, CLIENT, self.round).numpy()
        return torch.from_numpy(keys.fold(root, clients.numpy(), numbers.numpy()))

    @property
    def num_asked(self) -> int | None:
        """How many clients are asked to train; None: the algorithm's own number."""
        rules = self.elsewhere or (self.clock.reporting if self.clock is not None else None)
        if rules is None or rules.over_select == 1:
            return None
        select = self.algorithm.select
        many = math.ceil(rules.over_select * select.cohort_size - 1e-9)
        return many if select.replacement else min(many, self.federation.num_clients)


def ask(chosen: Sequence[tuple[Call, Tensor]]) -> list[Asked]:
    """The examples and batches of the chosen clients, for each call."""
    found = []
    for call, clients in chosen:
        own = call.keys(clients, occurrences(clients))
        found.append((clients, own, call.federation.holdings(call.round, clients)))
    draws = [call.algorithm.draw for call, _ in chosen]
    if len(draws) > 1 and draws[0].by_client and all(same(one, draws[0]) for one in draws):
        holdings = Holdings.joined([held for _, _, held in found])
        whole = draws[0](holdings, keys.fold(torch.cat([own for _, own, _ in found]), DRAW))
        ends = list(accumulate(len(clients) for clients, _, _ in found))
        rows = [slice(first, end) for first, end in pairwise([0, *ends])]
        plans = [Plan(whole.index[some], whole.counts[some]) for some in rows]
    else:
        plans = [
            draw(held, torch.from_numpy(keys.fold(own.numpy(), DRAW)))
            for draw, (_, own, held) in zip(draws, found, strict=True)
        ]
    return [Asked(*each, plan) for each, plan in zip(found, plans, strict=True)]


def occurrences(clients: Tensor) -> Tensor:
    """How often each client occurs earlier in the cohort: 0 unless it was drawn several times."""
    listed = clients.tolist()
    if len(set(listed)) == len(listed):
        return torch.zeros_like(clients)
    seen: Counter[int] = Counter()
    before = []
    for client in listed:
        before.append(seen[client])
        seen[client] += 1
    return torch.tensor(before)
