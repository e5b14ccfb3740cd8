"""Estimates of how long experiments take here: a few short, warm rounds are timed, extrapolated.

Points that a sweep stacks are timed as a stack, since they train together. Points that it spreads
over a Ray cluster are each timed on one worker there. The first rounds capture graphs and compile,
so they do not count as typical rounds. On a CPU the timing takes about half a minute, and is mostly
right to within a factor of two.

If clients train one after another, on a CPU, a round takes the sum of its clients' times: then a
few clients for one epoch are enough and, if even these are slow, one or a few batches of each.
"""

from __future__ import annotations

import contextlib
import hashlib
import heapq
import json
import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, starmap
from pathlib import Path
from typing import Any, NamedTuple

from fedlens.config.experiment import Experiment
from fedlens.core.federation import Examples
from fedlens.data.places import Counted
from fedlens.engines import Processes, Ray, Stacked
from fedlens.rounds import begin
from fedlens.runs.folder import Checkpoint
from fedlens.runs.loop import ActiveRun, run_to_end
from fedlens.runs.manifest import machine
from fedlens.runs.points import Point, drawn_plan, into_stacks, num_evaluations
from fedlens.runs.records import Record
from fedlens.runs.spread import SpreadPoints
from fedlens.runs.sweep import prepare
from fedlens.setup import Setup
from fedlens.setup.algorithm import make_algorithm
from fedlens.storage.files import write_atomically

WHOLE_SECONDS = 10.0  # if this is enough, rounds of a kind are timed in full, not shortened
CPU_SECONDS = 30.0  # for all kinds together, about; then kinds of one family share a cost
TIMED = 3  # rounds
BATCHES = (1, 4)  # per client, in the short rounds that are timed first
TESTED = 1000  # examples, in a short evaluation
FEW_TESTED = 100  # in the shortest, by a single worker
STEPS = 3  # of progress, at most, for one cost
ROUGH_SECONDS = 40.0  # maximum for two rounds of many batches, if more would take too long
DRAWN = 8  # rounds, to estimate the work of one
SMALL_RATE = 1e-6  # times the learning rate
EVEN = 0.8  # of the steps if all clients had the maximum: above it, they count as equal
REMEMBERED_SECONDS = 24 * 3600.0  # after that, the load of the machine may differ


class Estimate(NamedTuple):
    """The expected time of experiments that train together."""

    names: list[str]
    seconds: float


@dataclass(frozen=True)
class Stack:
    """Points that train together, and what their time depends on."""

    points: Sequence[Point]
    work: Work
    kind: str  # stacks of one kind have the same speed
    family: str  # about the same, if clients train one after another

    @property
    def setups(self) -> list[Setup]:
        return [point.setup for point in self.points]


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
        if on_one:
            points = [replace(point, setup=_on_one_worker(point.setup)) for point in points]
        work = self._work(points)
        # The partition matters only through the amount of work, to within a tenth; and not at all
        # if clients train one after another, since time is then proportional to their examples.
        tenths = [round(math.log(part + 1) / math.log(1.1)) for part in work]
        kinds = sorted(_kind(point.experiment, by_client=False) for point in points)
        kind = json.dumps([tenths if side_by_side([points[0].setup]) else [], on_one, *kinds])
        return Stack(points, work, kind, json.dumps([on_one, *map(_family, points)]))

    def _work(self, points: Sequence[Point]) -> Work:
        key = tuple(_kind(point.experiment) for point in points)
        if key not in self._works:
            self._works[key] = work_of([point.setup for point in points])
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
            left = [point for point in stack.points if point.experiment.rounds >= end]
            seconds += (end - before) * found.speed.of(self._work(left))
        return Estimate([point.name for point in stack.points], seconds)


def _family(point: Point) -> str:
    """The settings that the time per example depends on most."""
    plain = point.experiment.plain()
    keys = ("dataset", "model", "norm", "engine", "device", "precision", "augment", "train")
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


class Work(NamedTuple):
    """The quantities that determine the time of a round."""

    steps: float  # of the client with the most steps, if clients train side by side; else 0
    examples: float  # of all clients

    def less(self, other: Work) -> Work:
        return Work(self.steps - other.steps, self.examples - other.examples)


class Speed(NamedTuple):
    """The work of timed rounds, the seconds of one, and what further steps and examples take.

    Side by side on a GPU, a step of one client takes as long as a step of a few, and a step of many
    takes longer: if some clients train longer than others, both terms matter.
    """

    work: Work
    seconds: float
    a_step: float = 0.0
    an_example: float = 0.0

    def of(self, work: Work) -> float:
        further = work.less(self.work)
        more = self.a_step * further.steps + self.an_example * further.examples
        return max(self.seconds + more, 0.0)

    def scaled_to(self, timed: Speed) -> Speed:
        """The speed, rescaled to these rounds: long ones may cost less per step than short ones."""
        expected = self.of(timed.work)
        times = timed.seconds / expected if expected else 0.0
        return timed._replace(a_step=times * self.a_step, an_example=times * self.an_example)

    @classmethod
    def fitted(cls, few: Speed, many: Speed, uneven: Speed | None = None) -> Speed:
        """Fit to rounds of few steps, of many and, if needed, of many for some clients only."""
        further, seconds = many.work.less(few.work), max(many.seconds - few.seconds, 0.0)
        if further.examples <= 0:  # all clients hold few examples
            return many
        one_by_one = seconds / further.examples
        if further.steps <= 0:
            return many._replace(an_example=one_by_one)
        an_example = 0.0
        if uneven is not None and (less := many.work.less(uneven.work)).examples > 0:
            each = max(many.seconds - uneven.seconds, 0.0) / less.examples
            an_example = min(each, one_by_one)
        a_step = (seconds - an_example * further.examples) / further.steps
        return many._replace(a_step=a_step, an_example=an_example)


class Cost(NamedTuple):
    """Seconds of a stack: for its warm-up, of its rounds, and per evaluation of a point."""

    start: float
    speed: Speed
    an_evaluation: float


def cost(
    setups: Sequence[Setup], work: Work, seconds: float, tell: Callable[[], None] = lambda: None
) -> Cost:
    """The cost of a stack, by timing short rounds, and then whole rounds if these are fast enough.

    Each of both may take about `seconds`. `tell` is called after each step, at most `STEPS` times.
    """
    few, many = BATCHES
    if not side_by_side(setups):
        first = _rounds(setups, (few, few), timed=2, tested=FEW_TESTED)
        tell()
        warm = _num_warm(setups[0])
        a_round = first.speed.seconds / _with_few(setups[0], few)[1]
        if (warm + TIMED) * sum(BATCHES) * a_round > seconds:
            share = _num_tested(setups[0]) / max(_num_tested(setups[0], FEW_TESTED), 1)
            an_evaluation = first.an_evaluation * max(share / setups[0].engine.num_workers, 1.0)
            # Slow rounds spend little time on anything but examples.
            an_example = first.speed.seconds / max(first.speed.work.examples, 1.0)
            speed = first.speed._replace(an_example=an_example)
            if (warm + 1) * many * a_round < ROUGH_SECONDS:
                longer = _rounds(setups, (many, many), timed=1, tested=FEW_TESTED)
                speed = Speed.fitted(first.speed, longer.speed)
            return Cost(first.start, speed, an_evaluation)
    quick, slow = (_rounds(setups, (batches, batches)) for batches in BATCHES)
    tell()
    most = work.steps * sum(
        setup.experiment.clients.cohort * setup.experiment.local.batch_size for setup in setups
    )
    uneven = _rounds(setups, (many, few)).speed if work.examples < EVEN * most else None
    speed = Speed.fitted(quick.speed, slow.speed, uneven)
    share = _num_tested(setups[0]) / max(_num_tested(setups[0], TESTED), 1)
    an_evaluation = quick.an_evaluation * max(share, 1.0)
    rounds = _num_warm(setups[0]) + TIMED
    if rounds * speed.of(work) + 2 * len(setups) * an_evaluation < seconds:
        whole = _rounds(setups, None)
        start = quick.start + whole.start
        return Cost(start, speed.scaled_to(whole.speed), whole.an_evaluation)
    return Cost(quick.start, speed, an_evaluation)


def _num_warm(setup: Setup) -> int:
    """Rounds before the timed ones: a CUDA graph is captured only when a shape repeats."""
    return 4 if isinstance(setup.engine, Stacked) else 1


def _rounds(
    setups: Sequence[Setup],
    batches: tuple[int, int] | None,
    timed: int = TIMED,
    tested: int = TESTED,
) -> Cost:
    """The cost of rounds with `batches` per client, for even and odd client numbers (None: all).

    If clients train one after another, only a few are run, and the cost is scaled up to all.
    """
    began, warm = time.perf_counter(), _num_warm(setups[0])
    rounds, runs, times = warm + timed, [], 1.0
    for whole in setups:
        setup = _lasting(whole)
        if batches is not None and not side_by_side(setups):
            setup, times = _with_few(setup, batches[0])
        experiment = setup.experiment
        # Evaluated twice: the first evaluation may compile kernels.
        twice = replace(experiment.evaluate, every=rounds, at=(1,), twin=False)
        shown = replace(setup, experiment=replace(experiment, rounds=rounds, evaluate=twice))
        if batches is not None:
            most, most_of_odd = (count * experiment.local.batch_size for count in batches)
            parts = {name: _first(part, tested) for name, part in setup.parts.items()}
            federation = setup.federation.shortened(most, most_of_odd)
            shown = replace(shown, federation=federation, parts=parts, client_tests=None)
            if isinstance(setup.engine, Processes):  # otherwise this process predicts them alone
                shown = replace(shown, engine=setup.engine.with_examples([*parts.values()]))
        state = begin(shown.network, shown.program, shown.federation, shown.device)
        runs.append(ActiveRun(shown, Checkpoint(state)))
    results = run_to_end(runs)
    took = time.perf_counter() - began
    # A point that diverges ends early: the last rounds are those of the remaining points.
    by_round: dict[int, list[Record]] = {}
    for record in (record for result in results for record in result.records):
        by_round.setdefault(record["round"], []).append(record)
    each = [by_round[round] for round in sorted(by_round)[-timed:]]
    # Shortened rounds are equal: if one took longer, something else was running on the machine.
    middle = statistics.fmean if batches is None else statistics.median_low
    a_round = middle([sum(record["seconds"] for record in records) for records in each])
    work = _mean(
        Work(
            max(record["batches"] for record in records) if side_by_side(setups) else 0.0,
            times * sum(record["examples"] for record in records),
        )
        for records in each
    )
    evaluations = [record.get("evaluation_seconds", 0.0) for record in each[-1]]
    an_evaluation = statistics.fmean(evaluations)
    spent = rounds * a_round + 2 * sum(evaluations)
    return Cost(max(took - spent, 0.0), Speed(work, times * a_round), an_evaluation)


def _lasting(setup: Setup) -> Setup:
    """The setup with a learning rate so small that runs hardly diverge; this changes no time.

    A diverged point leaves the stack, and rounds of the others are slow until their new shapes are
    captured: these would be timed as if they were typical.
    """
    experiment = setup.experiment
    if not isinstance(experiment.local.lr, float):
        return setup
    local = replace(experiment.local, lr=SMALL_RATE * experiment.local.lr)
    return _changed(setup, replace(experiment, local=local)) or setup


def _changed(setup: Setup, experiment: Experiment) -> Setup | None:
    """The same data and network in another experiment; None if its algorithm refuses it."""
    try:
        program = replace(setup.program, algorithm=make_algorithm(experiment))
    except ValueError:  # for example, it needs more clients
        return None
    return replace(setup, experiment=experiment, program=program, _latest={})


def _with_few(setup: Setup, batches: int) -> tuple[Setup, float]:
    """The setup with few clients per round and one epoch, and the factor to the real number."""
    experiment, times = setup.experiment, _times(setup)
    local = replace(experiment.local, epochs=1)
    if local.steps is not None:
        local = replace(local, steps=batches)
    elif isinstance(experiment.local.epochs, float) and experiment.local.epochs < 1:
        local = experiment.local
    few = round(experiment.clients.cohort / times)
    clients = replace(experiment.clients, per_round=few) if times > 1 else experiment.clients
    changed = _changed(setup, replace(experiment, clients=clients, local=local))
    return (setup, 1.0) if changed is None else (changed, times)


def _times(setup: Setup) -> float:
    """The number of clients of a round, divided by the number that is timed."""
    # With one per worker, a round would last as long as the slowest client; with two each, slow
    # and fast clients even out.
    cohort, few = setup.experiment.clients.cohort, 2 * max(setup.engine.num_workers, 2)
    cut = cohort >= 2 * few and setup.clock is None and not side_by_side([setup])
    return cohort / few if cut else 1.0


def side_by_side(setups: Sequence[Setup]) -> bool:
    return isinstance(setups[0].engine, Stacked)


def work_of(setups: Sequence[Setup]) -> Work:
    """The mean work of a round, over plans drawn for `DRAWN` rounds."""
    drawn = ([drawn_plan(setup, round) for setup in setups] for round in range(DRAWN))
    return _mean(
        Work(
            max(int(plan.steps.max()) for plan in plans) if side_by_side(setups) else 0.0,
            sum(int(plan.counts.sum()) for plan in plans),
        )
        for plans in drawn
    )


def _mean(works: Iterable[Work]) -> Work:
    return Work(*map(statistics.fmean, zip(*works, strict=True)))


def _num_tested(setup: Setup, most: int | None = None) -> int:
    """The number of examples of an evaluation, with at most `most` of each part."""
    return sum(len(part) if most is None else min(len(part), most) for part in setup.parts.values())


def _first(examples: Examples, count: int) -> Examples:
    rows = examples.rows
    return Examples(
        images=examples.images[:count] if rows is None else examples.images,
        labels=examples.labels[:count],
        columns={name: column[:count] for name, column in examples.columns.items()},
        rows=None if rows is None else rows[:count],
    )


@dataclass(frozen=True)
class Remembered:
    """A cache of costs, by a hash of what they depend on: a small file each, valid for a day.

    A folder that cannot be used is ignored.
    """

    folder: Path

    def get(self, kind: str, setup: Setup) -> Cost | None:
        place = self._place(kind, setup)
        with contextlib.suppress(OSError, ValueError, TypeError):
            if 0 <= time.time() - place.stat().st_mtime < REMEMBERED_SECONDS:
                start, (work, *speed), an_evaluation = json.loads(place.read_text())
                seconds, a_step, an_example = map(float, speed)
                timed = Speed(Work(*map(float, work)), seconds, a_step, an_example)
                return Cost(float(start), timed, float(an_evaluation))
        return None

    def put(self, kind: str, setup: Setup, cost: Cost) -> None:
        with contextlib.suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            write_atomically(self._place(kind, setup), json.dumps(cost).encode())

    def _place(self, kind: str, setup: Setup) -> Path:
        """The file of a cost. Other machines, data and versions of Fedlens have other files."""
        known = [kind, machine(setup), setup.engine.num_workers, setup.dataset.digest]
        digest = hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()
        return self.folder / f"{digest}.json"
