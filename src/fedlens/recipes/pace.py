"""How fast rounds are here: a few short, warm rounds are timed, and longer ones are extrapolated.

If clients train one after another, on a CPU, a round takes the sum of its clients' times: then a
few clients for one epoch are enough and, if even these are slow, one or a few batches of each.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from fedlens.config.experiment import Experiment
from fedlens.core.federation import Examples
from fedlens.engines import Processes, Stacked
from fedlens.rounds import begin
from fedlens.runs.active import ActiveRun
from fedlens.runs.loop import run_to_end
from fedlens.runs.summary import Record
from fedlens.runs.workload import drawn_plan
from fedlens.setup import Setup
from fedlens.setup.algorithm import make_algorithm

TIMED = 3  # rounds
BATCHES = (1, 4)  # per client, in the short rounds that are timed first
TESTED = 1000  # examples, in a short evaluation
FEW_TESTED = 100  # in the shortest, by a single worker
STEPS = 3  # of progress, at most, for one cost
ROUGH_SECONDS = 40.0  # maximum for two rounds of many batches, if more would take too long
DRAWN = 8  # rounds, to estimate the work of one
SMALL_RATE = 1e-6  # times the learning rate
EVEN = 0.8  # of the steps if all clients had the maximum: above it, they count as equal


class Work(NamedTuple):
    """The quantities that determine the time of a round."""

    steps: float  # of the client with the most steps, if clients train side by side; else 0
    examples: float  # of all clients

    def less(self, other: Work) -> Work:
        return Work(self.steps - other.steps, self.examples - other.examples)


class Rounds(NamedTuple):
    """The work of timed rounds, and the seconds of one."""

    work: Work
    seconds: float


class Pace(NamedTuple):
    """seconds = timed + a_step * further steps + an_example * further examples.

    Side by side on a GPU, a step of one client takes as long as a step of a few, and a step of many
    takes longer: if some clients train longer than others, both terms matter.
    """

    timed: Rounds
    a_step: float = 0.0
    an_example: float = 0.0

    def of(self, work: Work) -> float:
        further = work.less(self.timed.work)
        more = self.a_step * further.steps + self.an_example * further.examples
        return max(self.timed.seconds + more, 0.0)

    def scaled_to(self, timed: Rounds) -> Pace:
        """The pace rescaled to these rounds: long rounds may cost less per step than short ones."""
        expected = self.of(timed.work)
        times = timed.seconds / expected if expected else 0.0
        return Pace(timed, times * self.a_step, times * self.an_example)

    @classmethod
    def in_proportion(cls, timed: Rounds) -> Pace:
        """A pace proportional to examples: slow rounds spend little time on anything else."""
        return cls(timed, an_example=timed.seconds / max(timed.work.examples, 1.0))

    @classmethod
    def fitted(cls, few: Rounds, many: Rounds, uneven: Rounds | None = None) -> Pace:
        """Fit to rounds of few steps, of many and, if needed, of many for some clients only."""
        further, seconds = many.work.less(few.work), max(many.seconds - few.seconds, 0.0)
        if further.examples <= 0:  # all clients hold few examples
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
    """Seconds of a stack: for its warm-up, of its rounds, and per evaluation of a point."""

    start: float
    pace: Pace
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
        a_round = first.pace.timed.seconds / _with_few(setups[0], few)[1]
        if (warm + TIMED) * sum(BATCHES) * a_round > seconds:
            share = _num_tested(setups[0]) / max(_num_tested(setups[0], FEW_TESTED), 1)
            an_evaluation = first.an_evaluation * max(share / setups[0].engine.num_workers, 1.0)
            pace = Pace.in_proportion(first.pace.timed)
            if (warm + 1) * many * a_round < ROUGH_SECONDS:
                longer = _rounds(setups, (many, many), timed=1, tested=FEW_TESTED)
                pace = Pace.fitted(first.pace.timed, longer.pace.timed)
            return Cost(first.start, pace, an_evaluation)
    quick, slow = (_rounds(setups, (batches, batches)) for batches in BATCHES)
    tell()
    most = work.steps * sum(
        setup.experiment.clients.cohort * setup.experiment.local.batch_size for setup in setups
    )
    uneven = _rounds(setups, (many, few)).pace.timed if work.examples < EVEN * most else None
    pace = Pace.fitted(quick.pace.timed, slow.pace.timed, uneven)
    share = _num_tested(setups[0]) / max(_num_tested(setups[0], TESTED), 1)
    an_evaluation = quick.an_evaluation * max(share, 1.0)
    rounds = _num_warm(setups[0]) + TIMED
    if rounds * pace.of(work) + 2 * len(setups) * an_evaluation < seconds:
        whole = _rounds(setups, None)
        return Cost(
            quick.start + whole.start, pace.scaled_to(whole.pace.timed), whole.an_evaluation
        )
    return Cost(quick.start, pace, an_evaluation)


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
        runs.append(ActiveRun(shown, state))
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
    return Cost(max(took - spent, 0.0), Pace(Rounds(work, times * a_round)), an_evaluation)


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
