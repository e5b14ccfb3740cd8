"""How long experiments will take here: a few warm rounds of them, timed, and the rest counted.

Points that a sweep stacks are timed as a stack, since they train together. The first rounds
record and compile, and are not counted as a round's time.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedlens import keys
from fedlens.build import Setup
from fedlens.core import Examples, Federation, Fixed, Holdings, Plan, Split
from fedlens.engines import Stacked
from fedlens.experiment import Evaluate, Experiment
from fedlens.rounds import begin
from fedlens.runs.active import ActiveRun, run_to_end
from fedlens.runs.sweep import Point, into_stacks, prepare

WARM, TIMED = 4, 3  # rounds: a shape is recorded as a CUDA graph when it comes the third time
BATCHES = (1, 4)  # of each client, in the short rounds that are timed first
TESTED = 1000  # examples, in a short evaluation
DRAWN = 8  # rounds, to see how much work is in one
WHOLE_SECONDS = 10.0  # if so many suffice, rounds are timed as they are, not shortened


@dataclass(frozen=True)
class Shortened(Split):
    """A split of which every client holds the first few examples."""

    whole: Split
    most: int

    @property
    def num_clients(self) -> int:
        return self.whole.num_clients

    def holdings(self, round: int, cohort: Tensor) -> Holdings:
        held = self.whole.holdings(round, cohort)
        return Holdings.of([held.members(k)[: self.most] for k in range(len(held))])


class Cost(NamedTuple):
    """Seconds of a stack: before it is warm, of a round of all its points, of one's evaluation."""

    start: float
    a_round: float
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
        """What each stack of a sweep will take, its evaluations included."""
        kinds = {name: _kind(experiment) for name, experiment in experiments.items()}
        points = [
            _standing_for(self.points[kinds[name]], name, experiment)
            for name, experiment in experiments.items()
        ]
        return [self._stack(stack, kinds) for stack in into_stacks(points)]

    def _stack(self, stack: Sequence[Point], kinds: Mapping[str, str]) -> Estimate:
        kind = json.dumps(sorted(kinds[point.name] for point in stack))
        is_new = kind not in self.costs
        if is_new:
            self.costs[kind] = _cost([point.setup for point in stack])
        cost = self.costs[kind]
        described = [point.experiment for point in stack]
        evaluations = sum(_num_evaluations(one.evaluate, one.rounds) for one in described)
        seconds = max(one.rounds for one in described) * cost.a_round
        seconds += evaluations * cost.an_evaluation + (cost.start if is_new else 0.0)
        return Estimate([point.name for point in stack], seconds)


@cache
def _num_evaluations(evaluate: Evaluate, rounds: int) -> int:
    return sum(evaluate.is_due(round, rounds) for round in range(1, rounds + 1))


def _kind(experiment: Experiment) -> str:
    """What the time of a round, and whether points can be stacked, depends on: no mere number."""
    plain = experiment.plain()
    numbers = ("seed", "rounds", "weights", "weights_sha256", "server", "algorithm")
    described: dict[str, Any] = {key: plain[key] for key in plain if key not in numbers}
    described["local"] = {key: value for key, value in plain["local"].items() if key != "lr"}
    described["algorithm"] = [
        [one.name, {k: v for k, v in one.options.items() if not isinstance(v, float)}]
        for one in experiment.algorithm
    ]
    described["evaluate"] = {key: plain["evaluate"].get(key) for key in ("on", "validation")}
    if "validation" in experiment.evaluate.on and experiment.clients.seed is None:
        described["seed"] = experiment.seed  # which says what is set apart
    return json.dumps(described, sort_keys=True)


def _standing_for(point: Point, name: str, experiment: Experiment) -> Point:
    """A point of the same kind, with an experiment of its own."""
    made = replace(point.setup.experiment, seed=experiment.seed, rounds=experiment.rounds)
    setup = replace(point.setup, experiment=made)
    return Point(name, experiment, setup, None, False)


def _cost(setups: Sequence[Setup]) -> Cost:
    """Of short rounds, which tell how long a whole one is; of whole ones, if that is soon done."""
    (few, quick), (many, slow) = (_rounds(setups, batches) for batches in BATCHES)
    tested = sum(map(len, setups[0].parts.values()))
    an_evaluation = quick.an_evaluation * max(tested / max(_tested(setups[0]), 1), 1.0)
    a_round, per_round = slow.a_round, _work(setups)
    if many > few:
        more = max(slow.a_round - quick.a_round, 0.0) / (many - few)
        a_round = max(slow.a_round + (per_round - many) * more, 0.0)
    if (WARM + TIMED) * a_round + 2 * len(setups) * an_evaluation < WHOLE_SECONDS:
        _, whole = _rounds(setups, None)
        return whole._replace(start=quick.start + whole.start)
    return Cost(quick.start, a_round, an_evaluation)


def _rounds(setups: Sequence[Setup], batches: int | None) -> tuple[float, Cost]:
    """The work of a round of so many batches a client (None: of all), and what it costs."""
    began = time.perf_counter()
    runs = []
    for setup in setups:
        experiment = setup.experiment
        # Evaluated twice: the first time may compile.
        twice = replace(experiment.evaluate, every=WARM, twin=False)
        shown = replace(setup, experiment=replace(experiment, rounds=WARM + TIMED, evaluate=twice))
        if batches is not None:
            most = batches * experiment.local.batch_size
            parts = {name: _first(part, TESTED) for name, part in setup.parts.items()}
            federation = _shortened(setup.federation, most)
            shown = replace(shown, federation=federation, parts=parts, held_out=None)
        state = begin(shown.network, shown.program, shown.federation, shown.device)
        runs.append(ActiveRun(shown, state))
    results = run_to_end(runs)
    took = time.perf_counter() - began
    last = [result.records[-TIMED:] for result in results]
    a_round = sum(statistics.median(record["seconds"] for record in records) for records in last)
    evaluations = [records[-1].get("evaluation_seconds", 0.0) for records in last]
    an_evaluation = statistics.fmean(evaluations)
    spent = (WARM + TIMED) * a_round + 2 * sum(evaluations)
    work = max(_measured(setups[0], records[-1]) for records in last)
    if not isinstance(setups[0].engine, Stacked):
        work = sum(_measured(setups[0], records[-1]) for records in last)
    return work, Cost(max(took - spent, 0.0), a_round, an_evaluation)


def _measured(setup: Setup, record: Mapping[str, Any]) -> float:
    """What a round's time grows with: steps where clients train side by side, else examples."""
    return float(record["batches" if isinstance(setup.engine, Stacked) else "examples"])


def _work(setups: Sequence[Setup]) -> float:
    """The same of whole rounds: the mean over some, by what is drawn in them."""
    found = []
    for round in range(DRAWN):
        plans = [_plan(setup, round) for setup in setups]
        if isinstance(setups[0].engine, Stacked):
            found.append(max(int(plan.steps.max()) for plan in plans))
        else:
            found.append(sum(int(plan.counts.sum()) for plan in plans))
    return statistics.fmean(found)


def _plan(setup: Setup, round: int) -> Plan:
    federation, algorithm = setup.federation, setup.program.algorithm
    key = keys.root(setup.experiment.seed, keys.purpose("estimate"), round)
    clients = algorithm.select(federation, round, key)
    return algorithm.draw(federation.holdings(round, clients), keys.fold(key, clients))


def _tested(setup: Setup) -> int:
    return sum(min(len(part), TESTED) for part in setup.parts.values())


def _first(examples: Examples, count: int) -> Examples:
    return replace(
        examples,
        images=examples.images[:count],
        labels=examples.labels[:count],
        columns={name: column[:count] for name, column in examples.columns.items()},
    )


def _shortened(federation: Federation, most: int) -> Federation:
    split: Split = Shortened(federation.split, most)
    if isinstance(federation.split, Fixed):
        split = Fixed(split.holdings(0, torch.arange(federation.num_clients)))
    return replace(federation, split=split)
