"""How long experiments will take here: a few warm rounds of them, timed, and the rest counted.

Points that a sweep stacks are timed as a stack, since they train together. Of those that it spreads
over a Ray cluster, each is timed on one worker there. The first rounds record and compile, and are
not counted as a round's time.
"""

from __future__ import annotations

import heapq
import json
import math
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedlens import keys
from fedlens.core import Plan
from fedlens.engines import Ray, Stacked
from fedlens.experiment import Evaluate, Experiment
from fedlens.federation import Examples, Federation, Fixed, Holdings, Split
from fedlens.rounds import begin
from fedlens.runs.active import ActiveRun, run_to_end
from fedlens.runs.points import Point, into_stacks
from fedlens.runs.spread import num_workers, shares_of, to_spread
from fedlens.runs.summary import Record
from fedlens.runs.sweep import prepare
from fedlens.setup import Setup

TIMED = 3  # rounds
BATCHES = (1, 4)  # of each client, in the short rounds that are timed first
TESTED = 1000  # examples, in a short evaluation
DRAWN = 8  # rounds, to see how much work is in one
EVEN = 0.8  # of the steps that there would be if all clients took as many: then they count as alike
WHOLE_SECONDS = 10.0  # if so many suffice, rounds are timed as they are, not shortened


@dataclass(frozen=True)
class Shortened(Split):
    """A split of which every client holds the first few examples; those of odd number may fewer."""

    whole: Split
    most: int
    most_of_odd: int

    @property
    def num_clients(self) -> int:
        return self.whole.num_clients

    def holdings(self, round: int, cohort: Tensor) -> Holdings:
        held = self.whole.holdings(round, cohort)
        most = [self.most_of_odd if client % 2 else self.most for client in cohort.tolist()]
        return Holdings.of([held.members(k)[:few] for k, few in enumerate(most)])


class Work(NamedTuple):
    """What the time of a round grows with."""

    steps: float  # of the client that takes the most, if clients train side by side; else 0
    examples: float  # of all clients

    def less(self, other: Work) -> Work:
        return Work(self.steps - other.steps, self.examples - other.examples)


class Rounds(NamedTuple):
    """Rounds of so much work, and their seconds."""

    work: Work
    seconds: float


class Pace(NamedTuple):
    """seconds = timed + a_step * further steps + an_example * further examples.

    Side by side, a step of one client takes a GPU as long as one of a few, and one of many longer:
    where some clients train longer than others, both count.
    """

    timed: Rounds
    a_step: float = 0.0
    an_example: float = 0.0

    def of(self, work: Work) -> float:
        further = work.less(self.timed.work)
        more = self.a_step * further.steps + self.an_example * further.examples
        return max(self.timed.seconds + more, 0.0)

    def scaled_to(self, timed: Rounds) -> Pace:
        """The same, but as fast as these rounds: long ones may cost less a step than short ones."""
        expected = self.of(timed.work)
        times = timed.seconds / expected if expected else 0.0
        return Pace(timed, times * self.a_step, times * self.an_example)

    @classmethod
    def fitted(cls, few: Rounds, many: Rounds, uneven: Rounds | None = None) -> Pace:
        """By rounds of few steps, of many and, where it matters, of many for some clients alone."""
        further, seconds = many.work.less(few.work), max(many.seconds - few.seconds, 0.0)
        if further.examples <= 0:  # all clients hold few
            return cls(many)
        one_by_one = seconds / further.examples
        if further.steps <= 0:
            return cls(many, an_example=one_by_one)
        an_example = 0.0
        if uneven is not None and (less := many.work.less(uneven.work)).examples > 0:
            each = max(many.seconds - uneven.seconds, 0.0) / less.examples
            an_example = min(each, one_by_one)
        return cls(many, (seconds - an_example * further.examples) / further.steps, an_example)


class Cost(NamedTuple):
    """Seconds of a stack: before it is warm, of its rounds, of one evaluation of a point."""

    start: float
    pace: Pace
    an_evaluation: float


class Estimate(NamedTuple):
    """What some of the experiments, which train together, will take."""

    names: list[str]
    seconds: float


class Timing:
    """Estimates of several sweeps; stacks whose rounds cost the same are timed once."""

    def __init__(self, experiments: Iterable[Experiment], data: Path | None = None) -> None:
        """`experiments` are all that there are in these sweeps."""
        # A file of weights may be another run's, yet to come; the time does not depend on it.
        kinds = {_kind(one): replace(one, weights=None, weights_sha256=None) for one in experiments}
        stacks = prepare(kinds, data=data).stacks
        self.points = {point.name: point for stack in stacks for point in stack}  # by kind
        self.costs: dict[str, Cost] = {}

    def sweep(self, experiments: Mapping[str, Experiment]) -> list[Estimate]:
        """What each stack of a sweep will take, its evaluations included; then what is spread."""
        kinds = {name: _kind(experiment) for name, experiment in experiments.items()}
        points = [
            _standing_for(self.points[kinds[name]], name, experiment)
            for name, experiment in experiments.items()
        ]
        spread = to_spread(points)
        elsewhere = {point.name for point in spread}
        here = [point for point in points if point.name not in elsewhere]
        found = [self._stack(stack) for stack in into_stacks(here)]
        return [*found, self._spread(spread)] if spread else found

    def _spread(self, points: Sequence[Point]) -> Estimate:
        """What the last worker of a cluster takes, if each share goes to who is free first.

        GPUs stack the points of a share, which takes less: these are timed one by one.
        """
        workers = num_workers(points)
        free_at = [0.0] * workers
        for share in shares_of(points, workers):
            seconds = sum(self._stack([point], on_one=True).seconds for point in share)
            heapq.heapreplace(free_at, free_at[0] + seconds)
        return Estimate([point.name for point in points], max(free_at))

    def _stack(self, stack: Sequence[Point], on_one: bool = False) -> Estimate:
        """Of points that train together; `on_one`: on one worker of a cluster."""
        described = [point.experiment for point in stack]
        setups = [_on_one_worker(point.setup) if on_one else point.setup for point in stack]
        # Who holds what matters by how much work it makes, to within a tenth.
        work = _work(setups)
        tenths = [round(math.log(part + 1) / math.log(1.1)) for part in work]
        kinds = sorted(_kind(one, by_client=False) for one in described)
        kind = json.dumps([tenths, on_one, *kinds])
        is_new = kind not in self.costs
        if is_new:
            self.costs[kind] = _cost(setups, work)
        cost = self.costs[kind]
        evaluations = sum(_num_evaluations(one.evaluate, one.rounds) for one in described)
        seconds = evaluations * cost.an_evaluation + (cost.start if is_new else 0.0)
        for before, end in pairwise([0, *sorted({one.rounds for one in described})]):
            left = [setup for setup in setups if setup.experiment.rounds >= end]
            of_left = work if len(left) == len(setups) else _work(left)
            seconds += (end - before) * cost.pace.of(of_left)
        return Estimate([point.name for point in stack], seconds)


@cache
def _num_evaluations(evaluate: Evaluate, rounds: int) -> int:
    return sum(evaluate.is_due(round, rounds) for round in range(1, rounds + 1))


def _kind(experiment: Experiment, by_client: bool = True) -> str:
    """What the time of a round, and whether points can be stacked, depends on: no mere number.

    With `by_client`, also on who holds what.
    """
    plain = experiment.plain()
    numbers = ("seed", "rounds", "weights", "weights_sha256", "server", "algorithm")
    described: dict[str, Any] = {key: plain[key] for key in plain if key not in numbers}
    described["local"] = {key: value for key, value in plain["local"].items() if key != "lr"}
    described["algorithm"] = [
        [one.name, {k: v for k, v in one.options.items() if not isinstance(v, float)}]
        for one in experiment.algorithm
    ]
    described["evaluate"] = {key: plain["evaluate"].get(key) for key in ("on", "validation")}
    if not by_client:
        described["clients"] = experiment.clients.per_round
    elif "validation" in experiment.evaluate.on and experiment.clients.seed is None:
        described["seed"] = experiment.seed  # which says what is set apart
    return json.dumps(described, sort_keys=True)


def _standing_for(point: Point, name: str, experiment: Experiment) -> Point:
    """A point of the same kind, with an experiment of its own."""
    made = replace(point.setup.experiment, seed=experiment.seed, rounds=experiment.rounds)
    setup = replace(point.setup, experiment=made)
    return Point(name, experiment, setup, None, False)


def _on_one_worker(setup: Setup) -> Setup:
    assert isinstance(setup.engine, Ray)
    return replace(setup, engine=setup.engine.of_one_worker())


def _cost(setups: Sequence[Setup], work: Work) -> Cost:
    """Of short rounds, which tell how long a whole one is; of whole ones, if that is soon done."""
    few, many = BATCHES
    quick, slow = (_rounds(setups, (batches, batches)) for batches in BATCHES)
    most = work.steps * sum(
        setup.experiment.clients.cohort * setup.experiment.local.batch_size for setup in setups
    )
    uneven = _rounds(setups, (many, few)).pace.timed if work.examples < EVEN * most else None
    pace = Pace.fitted(quick.pace.timed, slow.pace.timed, uneven)
    tested = sum(map(len, setups[0].parts.values()))
    an_evaluation = quick.an_evaluation * max(tested / max(_tested(setups[0]), 1), 1.0)
    rounds = _num_warm(setups[0]) + TIMED
    if rounds * pace.of(work) + 2 * len(setups) * an_evaluation < WHOLE_SECONDS:
        whole = _rounds(setups, None)
        return Cost(
            quick.start + whole.start, pace.scaled_to(whole.pace.timed), whole.an_evaluation
        )
    return Cost(quick.start, pace, an_evaluation)


def _num_warm(setup: Setup) -> int:
    """Rounds before those that are timed: a CUDA graph is recorded when a shape comes again."""
    return 4 if isinstance(setup.engine, Stacked) else 1


def _rounds(setups: Sequence[Setup], batches: tuple[int, int] | None) -> Cost:
    """What rounds cost of so many batches a client, those of even and of odd number (None: all)."""
    began, warm = time.perf_counter(), _num_warm(setups[0])
    rounds, runs = warm + TIMED, []
    for setup in setups:
        experiment = setup.experiment
        # Evaluated twice: the first time may compile.
        twice = replace(experiment.evaluate, every=rounds, at=(1,), twin=False)
        shown = replace(setup, experiment=replace(experiment, rounds=rounds, evaluate=twice))
        if batches is not None:
            most, most_of_odd = (count * experiment.local.batch_size for count in batches)
            parts = {name: _first(part, TESTED) for name, part in setup.parts.items()}
            federation = _shortened(setup.federation, most, most_of_odd)
            shown = replace(shown, federation=federation, parts=parts, client_tests=None)
        state = begin(shown.network, shown.program, shown.federation, shown.device)
        runs.append(ActiveRun(shown, state))
    results = run_to_end(runs)
    took = time.perf_counter() - began
    # A point that diverges ends before the others: the last rounds are those of who is left.
    by_round: dict[int, list[Record]] = {}
    for record in (record for result in results for record in result.records):
        by_round.setdefault(record["round"], []).append(record)
    each = [by_round[round] for round in sorted(by_round)[-TIMED:]]
    a_round = statistics.fmean(sum(record["seconds"] for record in records) for records in each)
    work = _mean(
        Work(
            max(record["batches"] for record in records) if _side_by_side(setups) else 0.0,
            sum(record["examples"] for record in records),
        )
        for records in each
    )
    evaluations = [record.get("evaluation_seconds", 0.0) for record in each[-1]]
    an_evaluation = statistics.fmean(evaluations)
    spent = rounds * a_round + 2 * sum(evaluations)
    return Cost(max(took - spent, 0.0), Pace(Rounds(work, a_round)), an_evaluation)


def _side_by_side(setups: Sequence[Setup]) -> bool:
    return isinstance(setups[0].engine, Stacked)


def _work(setups: Sequence[Setup]) -> Work:
    """Of a round: the mean over some, by what is drawn in them."""
    drawn = ([_plan(setup, round) for setup in setups] for round in range(DRAWN))
    return _mean(
        Work(
            max(int(plan.steps.max()) for plan in plans) if _side_by_side(setups) else 0.0,
            sum(int(plan.counts.sum()) for plan in plans),
        )
        for plans in drawn
    )


def _mean(works: Iterable[Work]) -> Work:
    return Work(*map(statistics.fmean, zip(*works, strict=True)))


def _plan(setup: Setup, round: int) -> Plan:
    federation, algorithm = setup.federation, setup.program.algorithm
    key = keys.root(setup.experiment.seed, keys.purpose("estimate"), round)
    clients = algorithm.select(federation, round, key)
    return algorithm.draw(federation.holdings(round, clients), keys.fold(key, clients))


def _tested(setup: Setup) -> int:
    return sum(min(len(part), TESTED) for part in setup.parts.values())


def _first(examples: Examples, count: int) -> Examples:
    rows = examples.rows
    return Examples(
        images=examples.images[:count] if rows is None else examples.images,
        labels=examples.labels[:count],
        columns={name: column[:count] for name, column in examples.columns.items()},
        rows=None if rows is None else rows[:count],
    )


def _shortened(federation: Federation, most: int, most_of_odd: int) -> Federation:
    split: Split = Shortened(federation.split, most, most_of_odd)
    if isinstance(federation.split, Fixed):
        split = Fixed(split.holdings(0, torch.arange(federation.num_clients)))
    return replace(federation, split=split)
