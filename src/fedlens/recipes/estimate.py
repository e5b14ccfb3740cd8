"""Estimates of how long experiments take here: a few warm rounds are timed and extrapolated.

Points that a sweep stacks are timed as a stack, since they train together. Points that it spreads
over a Ray cluster are each timed on one worker there. The first rounds capture graphs and compile,
so they do not count as typical rounds. On a CPU the timing takes about half a minute, and is mostly
right to within a factor of two.
"""

from __future__ import annotations

import heapq
import json
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, starmap
from pathlib import Path
from typing import Any, NamedTuple

from fedlens.config.experiment import Experiment
from fedlens.data.places import Counted
from fedlens.engines import Ray
from fedlens.recipes.pace import STEPS, Cost, Work, cost, side_by_side, work_of
from fedlens.recipes.remembered import Remembered
from fedlens.runs.points import Point, into_stacks
from fedlens.runs.spread import SpreadPoints
from fedlens.runs.sweep import prepare
from fedlens.runs.workload import num_evaluations
from fedlens.setup import Setup

WHOLE_SECONDS = 10.0  # if this is enough, rounds of a kind are timed in full, not shortened
CPU_SECONDS = 30.0  # for all kinds together, about; then kinds of one family share a cost


class Estimate(NamedTuple):
    """The expected time of experiments that train together."""

    names: list[str]
    seconds: float


@dataclass(frozen=True)
class Stack:
    """Points that train together, and what their time depends on."""

    points: Sequence[Point]
    setups: Sequence[Setup]
    work: Work
    kind: str  # stacks of one kind have the same speed
    family: str  # about the same, if clients train one after another


class Timing:
    """Estimates for several sweeps; stacks with equal cost per round are timed once."""

    def __init__(
        self,
        experiments: Iterable[Experiment],
        data: Path | None = None,
        remembered: Remembered | None = None,
    ) -> None:
        """`experiments` are all experiments of these sweeps.

        Costs `remembered` from an earlier timing are not timed again.
        """
        found = {_kind(one): one for one in experiments}
        # A weights file may be the result of a later run; the time does not depend on it.
        kinds = {k: replace(one, weights=None, weights_sha256=None) for k, one in found.items()}
        stacks = prepare(kinds, data=data).stacks
        self.points = {point.name: point for stack in stacks for point in stack}  # by kind
        self.costs: dict[str, Cost] = {}
        self._remembered = remembered
        self._works: dict[tuple[str, ...], Work] = {}
        self._setups: dict[tuple[str, int, int], Setup] = {}
        self._started: set[str] = set()

    def sweeps(
        self, stages: Iterable[Mapping[str, Experiment]], watch: Counted | None = None
    ) -> list[Estimate]:
        """Estimates for the stacks of sweeps, in order, then for points spread over a cluster.

        Evaluations are included. `watch` receives the progress of the timing.
        """
        here: list[Stack] = []
        apart: list[tuple[SpreadPoints, dict[str, Stack]]] = []
        for experiments in stages:
            points = [
                Point(name, experiment, self._setup(experiment), None, False)
                for name, experiment in experiments.items()
            ]
            spread = SpreadPoints.among(points)
            alone = {point.name: self._stack([point], on_one=True) for point in spread.points}
            others = [point for point in points if point.name not in alone]
            here += [self._stack(stack) for stack in into_stacks(others)]
            apart += [(spread, alone)] if alone else []
        self._time([*here, *(stack for _, alone in apart for stack in alone.values())], watch)
        return [*map(self._estimate, here), *starmap(self._spread, apart)]

    def _setup(self, experiment: Experiment) -> Setup:
        """The setup of its kind with its seed and rounds, cached: thousands may share one."""
        kind, seed, rounds = _kind(experiment), experiment.seed, experiment.rounds
        if (kind, seed, rounds) not in self._setups:
            setup = self.points[kind].setup
            described = replace(setup.experiment, seed=seed, rounds=rounds)
            self._setups[kind, seed, rounds] = replace(setup, experiment=described)
        return self._setups[kind, seed, rounds]

    def _stack(self, points: Sequence[Point], on_one: bool = False) -> Stack:
        """A stack of points; with `on_one`, on one worker of a cluster."""
        setups = [_on_one_worker(point.setup) if on_one else point.setup for point in points]
        work = self._work(points, setups)
        # The partition matters only through the amount of work, to within a tenth; and not at all
        # if clients train one after another, since time is then proportional to their examples.
        tenths = [round(math.log(part + 1) / math.log(1.1)) for part in work]
        kinds = sorted(_kind(point.experiment, by_client=False) for point in points)
        kind = json.dumps([tenths if side_by_side(setups) else [], on_one, *kinds])
        return Stack(points, setups, work, kind, json.dumps([on_one, *map(_family, points)]))

    def _work(self, points: Sequence[Point], setups: Sequence[Setup]) -> Work:
        key = tuple(_kind(point.experiment) for point in points)
        if key not in self._works:
            self._works[key] = work_of(setups)
        return self._works[key]

    def _time(self, stacks: Iterable[Stack], watch: Counted | None) -> None:
        """Time each kind of stack; after `CPU_SECONDS`, only one kind of each family."""
        new = {stack.kind: stack for stack in stacks if stack.kind not in self.costs}
        if self._remembered is not None:
            for kind, stack in list(new.items()):
                if (known := self._remembered.get(kind, stack.setups[0])) is not None:
                    self.costs[kind] = known
                    del new[kind]
        total, done, began = STEPS * len(new), 0, time.monotonic()

        def tell() -> None:
            nonlocal done
            done += 1
            if watch is not None:
                watch(done, total)

        if watch is not None and new:
            watch(0, total)
        seconds = min(WHOLE_SECONDS, CPU_SECONDS / max(len(new), 1))
        by_family: dict[str, Cost] = {}
        for number, (kind, stack) in enumerate(new.items(), 1):
            is_stacked = side_by_side(stack.setups)
            found = None if is_stacked else by_family.get(stack.family)
            if found is None or time.monotonic() - began < CPU_SECONDS:
                allowed = WHOLE_SECONDS if is_stacked else seconds
                found = cost(stack.setups, stack.work, allowed, tell)
            self.costs[kind] = by_family[stack.family] = found
            if self._remembered is not None:
                self._remembered.put(kind, stack.setups[0], found)
            done = STEPS * number - 1
            tell()

    def _spread(self, spread: SpreadPoints, alone: Mapping[str, Stack]) -> Estimate:
        """When the last worker of a cluster is done, if each share goes to the first free worker.

        GPUs stack the points of a share, which is faster than this sum of single points.
        """
        free_at = [0.0] * spread.num_workers
        for share in spread.shares:
            seconds = sum(self._estimate(alone[point.name]).seconds for point in share)
            heapq.heapreplace(free_at, free_at[0] + seconds)
        return Estimate([*alone], max(free_at))

    def _estimate(self, stack: Stack) -> Estimate:
        found, described = self.costs[stack.kind], [point.experiment for point in stack.points]
        evaluations = sum(num_evaluations(one.evaluate, one.rounds) for one in described)
        seconds = evaluations * found.an_evaluation
        if stack.kind not in self._started:
            self._started.add(stack.kind)
            seconds += found.start
        for before, end in pairwise([0, *sorted({one.rounds for one in described})]):
            left = [
                (point, setup)
                for point, setup in zip(stack.points, stack.setups, strict=True)
                if point.experiment.rounds >= end
            ]
            work = self._work([point for point, _ in left], [setup for _, setup in left])
            seconds += (end - before) * found.pace.of(work)
        return Estimate([point.name for point in stack.points], seconds)


def _family(point: Point) -> str:
    """The settings that the time per example depends on most."""
    plain = point.experiment.plain()
    keys = ("dataset", "model", "norm", "engine", "device", "precision", "augment", "train_last")
    return json.dumps([*(plain.get(key) for key in keys), plain["local"]["batch_size"]])


def _kind(experiment: Experiment, by_client: bool = True) -> str:
    """The settings that the time of a round and stacking depend on, without mere numbers.

    With `by_client`, these include the clients and their partition.
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
        described["seed"] = experiment.seed  # it determines the validation examples
    return json.dumps(described, sort_keys=True)


def _on_one_worker(setup: Setup) -> Setup:
    assert isinstance(setup.engine, Ray)
    return replace(setup, engine=setup.engine.of_one_worker())
