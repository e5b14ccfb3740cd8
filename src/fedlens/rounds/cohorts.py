"""Which clients take part in a round: some are asked to train, and some of these report.

Without a clock every client that is asked reports. With one, `Synchronous` rounds wait for the
first reports, and ask again if these are too few; `Asynchronous` rounds take the next arrivals.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fedlens.algorithm import Algorithm, same
from fedlens.config.names import OUTCOMES, REPORTED
from fedlens.core import Plan, Tree, keys
from fedlens.core.federation import Federation, Holdings
from fedlens.rounds.devices import alike
from fedlens.rounds.reports import PAUSE, REJECTED, Clock, Reporting

MOST_ATTEMPTS = 1000  # to get reports, in one round
MOST_ALIKE = 3  # attempts with the same real clients before others are asked in their place
MOST_TRAINED = 10  # attempts in which clients trained, and too many updates were rejected

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
        own = self.clients[rows], self.keys[rows], self.holdings.take(rows)
        return Asked(*own, self.plan.rows(rows))


class Started(NamedTuple):
    """A client that trains while the server continues, in asynchronous rounds."""

    client: int
    version: int  # the round whose model it has
    number: int  # the wave of that round in which it started
    outcome: str
    time: float  # of its end


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
    chosen_by: int | None = None  # the seed by which clients are selected, if it is another one

    def select(self, count: int | None = None, *again: int) -> Tensor:  # [C]
        """Select `count` clients, or the algorithm's own number; `again` makes another draw."""
        seed = self.seed if self.chosen_by is None else self.chosen_by
        key = keys.root(seed, SELECT, self.round)
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
        plans = [whole.rows(some) for some in rows]
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


_NONE = torch.empty(0, dtype=torch.int64)
_NOBODY = Asked(_NONE, _NONE, Holdings.of([]), Plan(_NONE.view(0, 0, 0), _NONE.view(0, 0)))


class Gathering(Protocol):
    """How the server collects the reports of a round."""

    def reports(self) -> Reports: ...

    def without(self, reports: Reports, rejected: Mapping[int, str]) -> Reports:
        """The same round without some rows, each of which is `rejected` for a reason."""
        ...


@dataclass(frozen=True)
class Synchronous(Gathering):
    """Takes the first `goal` reports before the deadline; below quorum it asks others, or stops."""

    call: Call
    clock: Clock
    asked: Asked  # at first

    @property
    def goal(self) -> int:
        return min(self.call.algorithm.select.cohort_size, len(self.asked.clients))

    @property
    def quorum(self) -> int:
        return self.clock.reporting.needed(self.goal, self.call.algorithm.combine.fewest)

    def reports(self) -> Reports:
        return self._from(Reports(_NOBODY, time=self.call.time, attempts=0, num_trained=0))

    def without(self, reports: Reports, rejected: Mapping[int, str]) -> Reports:
        left = _refused(reports, rejected)
        if len(left.reported.clients) >= self.quorum:
            return left
        left = _in_vain(left)
        if reports.num_trained >= MOST_TRAINED or self.clock.reporting.below_quorum == "stop":
            raise self._stop(left)
        return self._from(replace(left, time=left.time + PAUSE))

    def _from(self, before: Reports) -> Reports:
        """The reports of the next attempt that reaches the quorum."""
        time, failed = before.time, before.failed
        for attempt in range(before.attempts, MOST_ATTEMPTS):
            asked = self.asked if attempt == 0 else _ask_again(self.call, attempt)
            fault_keys = asked.keys if attempt == 0 else keys.fold(asked.keys, ATTEMPT, attempt)
            ends = self.clock.ends(asked.clients, fault_keys, asked.plan.counts.sum(1), time)
            outcomes, time = self.clock.first(ends, self.goal, time)
            rows = [row for row, outcome in enumerate(outcomes) if outcome == REPORTED]
            enough = len(rows) >= self.quorum
            others: dict[str, list[int]] = {}
            for client, outcome in zip(asked.clients.tolist(), outcomes, strict=True):
                if outcome != REPORTED or not enough:
                    name = "surplus" if outcome == REPORTED else outcome
                    others.setdefault(name, []).append(client)
            failed = _joined(failed, others)
            found = Reports(asked.rows(rows), failed, time, attempt + 1, before.num_trained + 1)
            if enough:
                return found
            if self.clock.reporting.below_quorum == "stop":
                raise self._stop(found)
            time += PAUSE
        raise self._stop(found)

    def _stop(self, found: Reports) -> BelowQuorum:
        return _below_quorum(self.call, found, len(self.asked.clients), self.quorum)


@dataclass(frozen=True)
class AsAsked(Gathering):
    """All clients report. At real sites, which of them answered is only known afterwards."""

    call: Call
    asked: Asked  # at first

    def reports(self) -> Reports:
        return Reports(self.asked)

    def without(self, reports: Reports, rejected: Mapping[int, str]) -> Reports:
        left, algorithm = _refused(reports, rejected), self.call.algorithm
        goal = min(algorithm.select.cohort_size, len(self.asked.clients))
        assert self.call.elsewhere is not None, "without a clock nothing is rejected here"
        quorum = self.call.elsewhere.needed(goal, algorithm.combine.fewest)
        if len(left.reported.clients) >= quorum:
            return left
        if self.call.elsewhere.below_quorum == "stop" or left.attempts >= MOST_TRAINED:
            raise _below_quorum(self.call, _in_vain(left), len(self.asked.clients), quorum)
        # Clients that answered need not train again. If the others are back, the result is the
        # same as without a failure.
        same = left.attempts < MOST_ALIKE
        again = self.asked if same else self._in_order(_ask_again(self.call, left.attempts))
        idle = set(left.reported.clients.tolist()) - set(again.clients.tolist())
        failed = _joined(left.failed, {"surplus": sorted(idle)})
        return replace(left, reported=again, failed=failed, attempts=left.attempts + 1)

    def _in_order(self, again: Asked) -> Asked:
        """The clients in the order of those asked at first, then the others by number.

        Sums depend on the order: the same clients give the same bytes, however often some failed.
        """
        place = {key: row for row, key in enumerate(self.asked.keys.tolist())}
        clients, own_keys = again.clients.tolist(), again.keys.tolist()
        return again.rows(
            sorted(
                range(len(clients)),
                key=lambda row: (place.get(own_keys[row], len(place)), clients[row]),
            )
        )


@dataclass(frozen=True)
class Asynchronous(Gathering):
    """Takes the next `buffer` reports; when a client ends, another starts from the newest model.

    Clients that end at the same time are replaced together, after the server's step if one is due.
    Clients that still train are stored as a tree of tensors [M], so that a state can hold them.
    """

    call: Call
    clock: Clock
    buffer: int

    def reports(self) -> Reports:
        return self._from(Reports(_NOBODY, time=self.call.time, in_training=self.call.in_training))

    def without(self, reports: Reports, rejected: Mapping[int, str]) -> Reports:
        left = _refused(reports, rejected)
        if reports.num_trained >= MOST_TRAINED:
            raise BelowQuorum(
                f"in round {self.call.round + 1} updates were rejected "
                f"{reports.num_trained} times in a row: try a smaller local.lr",
                _in_vain(left),
            )
        return self._from(replace(left, num_trained=left.num_trained + 1))

    def _from(self, before: Reports) -> Reports:
        """`before` with further reports, until the buffer is full."""
        time, waves, arrived, tries = before.time, before.num_waves, list(before.arrived), 0
        training = _from_tree(before.in_training)
        failed: dict[str, list[int]] = {}
        while len(arrived) < self.buffer:
            if not training or min(one.time for one in training) > time:
                training, missed = self._start_more(training, arrived, time, waves)
                waves, tries = waves + 1, tries + 1
                if missed:
                    failed.setdefault("unavailable", []).extend(missed)
            if tries > MOST_ATTEMPTS:
                raise BelowQuorum(
                    f"in round {self.call.round + 1} no client reported, though some were asked "
                    f"{MOST_ATTEMPTS} times: choose longer hours, or fewer faults",
                    _in_vain(replace(before, failed=_joined(before.failed, failed))),
                )
            if not training:  # no client is available
                time += PAUSE
                continue
            first = min(training, key=lambda one: one.time)  # if equal, the first to start
            training.remove(first)
            time = max(time, first.time)
            if first.outcome == REPORTED:
                arrived.append(first)
                tries = 0
            else:
                failed.setdefault(first.outcome, []).append(first.client)
        return replace(
            before,
            reported=self._asked(arrived),
            failed=_joined(before.failed, failed),
            time=time,
            arrived=tuple(arrived),
            in_training=_to_tree(training),
            num_waves=waves,
        )

    def _start_more(
        self, training: list[Started], arrived: list[Started], time: float, wave: int
    ) -> tuple[list[Started], list[int]]:
        """Start clients while there is room; return all that train, and those not available."""
        call, busy = self.call, {one.client for one in training}
        room = call.algorithm.select.cohort_size - len(training)
        if call.algorithm.remembers:  # their new memory exists only after the server's step
            busy |= {one.client for one in arrived}
        if not room or len(busy) == call.federation.num_clients:
            return training, []
        count = min(room + len(busy), call.federation.num_clients)
        drawn = call.select(count, *((ATTEMPT, wave) if wave else ()))
        chosen = [client for client in drawn.tolist() if client not in busy][:room]
        clients = torch.tensor(chosen, dtype=torch.int64)
        numbers = torch.full_like(clients, wave)  # each wave draws other batches
        own = call.keys(clients, numbers)
        holdings = call.federation.holdings(call.round, clients)
        plan = call.algorithm.draw(holdings, keys.fold(own, DRAW))
        ends = self.clock.ends(clients, own, plan.counts.sum(1), time)
        started = [
            Started(client, call.round, wave, *end)
            for client, end in zip(chosen, ends, strict=True)
            if end.outcome != "unavailable"
        ]
        gone = set(chosen) - {one.client for one in started}
        return [*training, *started], sorted(gone)

    def _asked(self, arrived: Sequence[Started]) -> Asked:
        """The examples and batches of the clients that reported, each in the round of its model."""
        by_version: dict[int, list[int]] = {}
        for row, one in enumerate(arrived):
            by_version.setdefault(one.version, []).append(row)
        clients, own, held = [], [], []
        for version, rows in by_version.items():
            call = replace(self.call, round=version)
            some, numbers = (
                torch.tensor([getattr(arrived[row], name) for row in rows])
                for name in ("client", "number")
            )
            clients.append(some)
            own.append(call.keys(some, numbers))
            held.append(call.federation.holdings(version, some))
        place = torch.tensor([row for rows in by_version.values() for row in rows]).argsort()
        holdings, own_keys = Holdings.joined(held).take(place), torch.cat(own)[place]
        plan = self.call.algorithm.draw(holdings, keys.fold(own_keys, DRAW))
        return Asked(torch.cat(clients)[place], own_keys, holdings, plan)


def gathering(call: Call, asked: Asked | None) -> Gathering:
    """How a round collects its reports; `asked` are the first clients (None: asynchronous)."""
    pace = call.algorithm.pace
    if pace is not None:
        clock = call.clock or Clock(alike(call.federation.num_clients, keys.root(call.seed)))
        return Asynchronous(call, clock, pace.buffer)
    assert asked is not None
    if call.clock is None or call.elsewhere is not None:
        return AsAsked(call, asked)
    return Synchronous(call, call.clock, asked)


def _ask_again(call: Call, attempt: int) -> Asked:
    (asked,) = ask([(call, call.select(call.num_asked, ATTEMPT, attempt))])
    return asked


def _below_quorum(call: Call, found: Reports, num_asked: int, quorum: int) -> BelowQuorum:
    others = ", ".join(f"{len(clients)} {name}" for name, clients in found.failed.items())
    return BelowQuorum(
        f"in round {call.round + 1}, {len(found.reported.clients)} of {num_asked} clients "
        f"reported, and the quorum is {quorum} (attempt {found.attempts}; {others}): choose a "
        "lower reporting.quorum, a later deadline, a higher over_select or largest, or fewer "
        "faults",
        found,
    )


def _refused(reports: Reports, rejected: Mapping[int, str]) -> Reports:
    """The reports without the rows whose updates are rejected."""
    listed = reports.reported.clients.tolist()
    kept = [row for row in range(len(listed)) if row not in rejected]
    failed: dict[str, list[int]] = {}
    for row, reason in rejected.items():
        failed.setdefault(reason, []).append(listed[row])
    return replace(
        reports,
        reported=reports.reported.rows(kept),
        failed=_joined(reports.failed, failed),
        arrived=tuple(reports.arrived[row] for row in kept if reports.arrived),
    )


def _in_vain(reports: Reports) -> Reports:
    """The reports with those who reported listed as surplus, since they were too few."""
    surplus = {"surplus": reports.reported.clients.tolist()}
    return replace(reports, failed=_joined(reports.failed, surplus))


def _joined(
    one: Mapping[str, Sequence[int]], other: Mapping[str, Sequence[int]]
) -> dict[str, list[int]]:
    found = {name: [*one.get(name, ()), *other.get(name, ())] for name in OUTCOMES}
    return {name: clients for name, clients in found.items() if clients}


def _to_tree(in_training: Sequence[Started]) -> Tree:
    columns = {name: [getattr(one, name) for one in in_training] for name in Started._fields}
    columns["outcome"] = [OUTCOMES.index(outcome) for outcome in columns["outcome"]]
    whole, time = torch.int64, torch.float64
    return {n: torch.tensor(c, dtype=time if n == "time" else whole) for n, c in columns.items()}


def _from_tree(tree: Tree) -> list[Started]:
    rows = zip(*(tree[name].tolist() for name in Started._fields), strict=True) if tree else ()
    return [Started(*row)._replace(outcome=OUTCOMES[row[3]]) for row in rows]
