"""Estimates of how long experiments take here: a few short rounds are timed, and extrapolated.

Points that a sweep stacks are timed as a stack, since they train together. Points that it spreads
over a Ray cluster are timed on one worker there. If clients train one after another, on a CPU, only
a few of them are timed. Runs that differ in their clients, partitions and schedules share a cost by
unit of work, so the timing takes seconds; it is mostly right to within a factor of two.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fedlens.config.experiment import Experiment
from fedlens.data.places import Counted
from fedlens.engines import Ray, Stacked
from fedlens.rounds import begin
from fedlens.runs.folder import Checkpoint
from fedlens.runs.loop import ActiveRun, run_to_end
from fedlens.runs.points import Point, drawn_plan, into_stacks, num_evaluations
from fedlens.runs.spread import SpreadPoints
from fedlens.runs.sweep import prepare
from fedlens.setup import Setup
from fedlens.setup.algorithm import make_algorithm

SECONDS = 15.0  # for all kinds together, about; then kinds with the same model share a cost
LONG_SECONDS = 3.0  # if rounds of one batch took longer, no longer ones are timed
BATCHES = (1, 6)  # per client, in timed rounds
TIMED = 2  # rounds
TESTED = 500  # examples of each part, in a timed evaluation
DRAWN = 8  # rounds, to estimate the work of one
SMALL_RATE = 1e-6  # times the learning rate


class Estimate(NamedTuple):
    """The expected time of experiments that train together."""

    names: list[str]
    seconds: float


class Cost(NamedTuple):
    """Seconds of a stack: of a round, and for evaluations."""

    a_round: float
    a_unit: float  # of work
    a_tested: float  # example, of a point

    def of(self, work: float) -> float:
        return self.a_round + self.a_unit * work


@dataclass(frozen=True)
class Stack:
    """Points that train together."""

    points: Sequence[Point]
    work: float
    kind: str  # stacks of one kind have the same cost
    family: str  # about the same cost

    @property
    def setups(self) -> list[Setup]:
        return [point.setup for point in self.points]


class Timing:
    """Estimates for several sweeps; stacks of one kind are timed once."""

    def __init__(self, experiments: Iterable[Experiment], data: Path | None = None) -> None:
        """`experiments` are all experiments of these sweeps."""
        found = {_described(one): one for one in experiments}
        # A weights file may be the result of a later run; the time does not depend on it.
        like = {key: replace(one, weights=None, weights_sha256=None) for key, one in found.items()}
        stacks = prepare(like, data=data).stacks
        self.setups = {point.name: point.setup for stack in stacks for point in stack}
        self.costs: dict[str, Cost] = {}
        self._works: dict[tuple[str, ...], float] = {}

    def sweeps(
        self, stages: Iterable[Mapping[str, Experiment]], watch: Counted | None = None
    ) -> list[Estimate]:
        """Estimates for the stacks of sweeps, in order, then for points spread over a cluster.

        Evaluations are included. `watch` receives the progress of the timing.
        """
        here: list[Stack] = []
        apart: list[tuple[SpreadPoints, list[Stack]]] = []
        for experiments in stages:
            points = [
                Point(name, one, self.setups[_described(one)], None, False)
                for name, one in experiments.items()
            ]
            spread = SpreadPoints.among(points)
            names = {point.name for point in spread.points}
            here += map(self._stack, into_stacks([p for p in points if p.name not in names]))
            if names:
                alone = [self._stack([_on_one(point)], on_one=True) for point in spread.points]
                apart.append((spread, alone))
        self._time([*here, *(stack for _, alone in apart for stack in alone)], watch)
        found = [Estimate([p.name for p in stack.points], self._seconds(stack)) for stack in here]
        for spread, alone in apart:
            each = [self._seconds(stack) for stack in alone]
            seconds = max(sum(each) / spread.num_workers, *each)
            found.append(Estimate([point.name for point in spread.points], seconds))
        return found

    def _stack(self, points: Sequence[Point], on_one: bool = False) -> Stack:
        described = tuple(_described(point.experiment) for point in points)
        if described not in self._works:
            self._works[described] = work_of([point.setup for point in points])
        side = [point.experiment.clients.cohort for point in points if side_by_side(point.setup)]
        kinds = sorted(_kind(point.experiment) for point in points)
        families = sorted({_family(point.experiment) for point in points})
        kind, family = (json.dumps([on_one, side, some]) for some in (kinds, families))
        return Stack(points, self._works[described], kind, family)

    def _time(self, stacks: Iterable[Stack], watch: Counted | None) -> None:
        new = {stack.kind: stack for stack in stacks if stack.kind not in self.costs}
        by_family: dict[str, Cost] = {}
        began = time.monotonic()
        for number, (kind, stack) in enumerate(new.items()):
            if watch is not None:
                watch(number, len(new))
            if stack.family not in by_family or time.monotonic() - began < SECONDS:
                by_family[stack.family] = cost(stack.setups)
            self.costs[kind] = by_family[stack.family]
        if watch is not None and new:
            watch(len(new), len(new))

    def _seconds(self, stack: Stack) -> float:
        found, seconds = self.costs[stack.kind], 0.0
        for point in stack.points:
            experiment = point.experiment
            evaluations = num_evaluations(experiment.evaluate, experiment.rounds)
            seconds += evaluations * _num_tested(point.setup) * found.a_tested
        rounds = max(point.experiment.rounds for point in stack.points)
        return seconds + rounds * found.of(stack.work)


def _described(experiment: Experiment) -> str:
    """The settings that the work of a round and stacking depend on, without mere numbers."""
    plain = experiment.plain()
    numbers = ("seed", "rounds", "weights", "weights_sha256", "server")
    described: dict[str, Any] = {key: plain[key] for key in plain if key not in numbers}
    described["local"] = {key: value for key, value in plain["local"].items() if key != "lr"}
    described["algorithm"] = _algorithm(experiment)
    described["evaluate"] = {key: plain["evaluate"].get(key) for key in ("on", "validation")}
    if "validation" in experiment.evaluate.on and experiment.clients.seed is None:
        described["seed"] = experiment.seed  # it determines the validation examples
    return json.dumps(described, sort_keys=True)


def _algorithm(experiment: Experiment) -> list[Any]:
    return [
        [one.name, {k: v for k, v in one.options.items() if not isinstance(v, float)}]
        for one in experiment.algorithm
    ]


def _kind(experiment: Experiment) -> str:
    """The settings that the time of a unit of work depends on."""
    return json.dumps([_family(experiment), _algorithm(experiment), experiment.plain()["loss"]])


def _family(experiment: Experiment) -> str:
    """Those that it depends on most."""
    plain = experiment.plain()
    keys = ("dataset", "model", "norm", "engine", "device", "precision", "augment", "train")
    return json.dumps([*(plain.get(key) for key in keys), plain["local"]["batch_size"]])


def _on_one(point: Point) -> Point:
    """The point, on one worker of a cluster."""
    engine = point.setup.engine
    assert isinstance(engine, Ray)
    return replace(point, setup=replace(point.setup, engine=engine.of_one_worker()))


def side_by_side(setup: Setup) -> bool:
    return isinstance(setup.engine, Stacked)


def work_of(setups: Sequence[Setup]) -> float:
    """What the time of a round grows with, on average over plans drawn for `DRAWN` rounds.

    If clients train one after another, these are their examples. Side by side, a step of a few
    takes as long as of one on a GPU, and of many longer: half way between the steps of the longest
    and their mean, it is never far from either.
    """
    each = []
    for number in range(DRAWN):
        plans = [drawn_plan(setup, number) for setup in setups]
        steps = torch.cat([plan.steps for plan in plans]).double()
        examples = sum(float(plan.counts.sum()) for plan in plans)
        is_stacked = side_by_side(setups[0])
        each.append(float(steps.max() + steps.mean()) / 2 if is_stacked else examples)
    return statistics.fmean(each)


def cost(setups: Sequence[Setup]) -> Cost:
    """The cost of a stack, from short rounds, and longer ones unless these would take too long."""
    began = time.monotonic()
    few = [_shortened(setup, BATCHES[0]) for setup in setups]
    seconds, a_tested = _time_rounds(few)
    work = work_of(few)
    proportional = Cost(0.0, seconds / max(work, 1.0), a_tested)
    if time.monotonic() - began > LONG_SECONDS:  # slow rounds spend little time but on examples
        return proportional
    many = [_shortened(setup, BATCHES[1]) for setup in setups]
    longer, _ = _time_rounds(many)
    if (further := work_of(many) - work) <= 0:  # all clients hold few examples
        return proportional
    a_unit = max(longer - seconds, 0.0) / further
    return Cost(max(seconds - a_unit * work, 0.0), a_unit, a_tested)


def _time_rounds(setups: Sequence[Setup]) -> tuple[float, float]:
    """The seconds of a warm round, and for an example evaluated."""
    runs = []
    for setup in setups:
        state = begin(setup.network, setup.program, setup.federation, setup.device)
        runs.append(ActiveRun(setup, Checkpoint(state)))
    records = [record for result in run_to_end(runs) for record in result.records]
    last = max(record["round"] for record in records)
    timed = [record for record in records if record["round"] > last - TIMED]
    a_round = sum(record["seconds"] for record in timed) / min(TIMED, last)
    evaluations = [one for one in (r.get("evaluation_seconds") for r in timed) if one is not None]
    workers = 1 if side_by_side(setups[0]) else setups[0].engine.num_workers
    # Workers know only whole parts: these are evaluated here, by this process.
    tested = workers * max(_num_tested(setups[0]), 1)
    return a_round, statistics.fmean(evaluations or [0.0]) / tested


def _shortened(setup: Setup, batches: int) -> Setup:
    """The setup with a few clients, unless they train side by side, and `batches` of each.

    Its learning rate is so small that runs hardly diverge: the rounds of others would change.
    """
    experiment = setup.experiment
    local, clients = experiment.local, experiment.clients
    if isinstance(local.lr, float):
        local = replace(local, lr=SMALL_RATE * local.lr)
    local = replace(local, epochs=1, steps=None if local.steps is None else batches)
    few = 2 * max(setup.engine.num_workers, 2)  # of two each, the slow and the fast even out
    if not side_by_side(setup) and setup.clock is None and clients.cohort > few:
        clients = replace(clients, per_round=few)
    # A CUDA graph is captured only when a shape repeats. The first evaluation may compile kernels.
    rounds = TIMED + (4 if side_by_side(setup) else 1)
    enough = max(rounds, experiment.rounds)  # noise is calibrated for all rounds there are
    described = replace(experiment, rounds=enough, local=local, clients=clients)
    setup = _changed(setup, described)
    rounds = min(rounds, setup.experiment.rounds)
    twice = replace(experiment.evaluate, every=rounds, at=(1,), twin=False)
    parts = {
        name: part.take(torch.arange(len(part))[:TESTED]).to(part.labels.device)
        for name, part in setup.parts.items()
    }
    return replace(
        setup,
        experiment=replace(setup.experiment, rounds=rounds, evaluate=twice),
        federation=setup.federation.shortened(batches * local.batch_size),
        parts=parts,
        client_tests=None,
    )


def _changed(setup: Setup, experiment: Experiment) -> Setup:
    """The same data and network in another experiment, unless its algorithm refuses it."""
    try:
        program = replace(setup.program, algorithm=make_algorithm(experiment))
    except ValueError:  # for example, it needs more clients
        return setup
    return replace(setup, experiment=experiment, program=program, _latest={})


def _num_tested(setup: Setup) -> int:
    return sum(map(len, setup.parts.values()))
