"""How fast rounds are here: a few warm ones are timed, shortened, and longer ones follow of them.

Where clients train one after another, on a CPU, a round takes as long as its clients together: then
a few of them, for one epoch, say enough, and where even these are slow, a batch or a few of each.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from fedlens.engines import Processes, Stacked
from fedlens.experiment import Experiment
from fedlens.federation import Examples
from fedlens.rounds import begin
from fedlens.runs.active import ActiveRun
from fedlens.runs.loop import run_to_end
from fedlens.runs.summary import Record
from fedlens.runs.workload import drawn_plan
from fedlens.setup import Setup
from fedlens.setup.algorithm import make_algorithm

TIMED = 3  # rounds
BATCHES = (1, 4)  # of each client, in the short rounds that are timed first
TESTED = 1000  # examples, in a short evaluation
FEW_TESTED = 100  # in the shortest, which one worker does alone
STEPS = 3  # of one cost
ROUGH_SECONDS = 40.0  # at the most, for two rounds of many batches where more would take long
DRAWN = 8  # rounds, to see how much work is in one
SMALL_RATE = 1e-6  # times the learning rate
EVEN = 0.8  # of the steps that there would be if all clients took as many: then they count as alike


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
    def in_proportion(cls, timed: Rounds) -> Pace:
        """As if nothing took time but examples: rounds that are slow do little else."""
        return cls(timed, an_example=timed.seconds / max(timed.work.examples, 1.0))

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


def cost(
    setups: Sequence[Setup], work: Work, seconds: float, tell: Callable[[], None] = lambda: None
) -> Cost:
    """Of short rounds, which tell how long a whole one is; of whole ones, if that is soon done.

    About `seconds` may go into either. `tell` is called after each step of at most
    `STEPS`.
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
    """Rounds before those that are timed: a CUDA graph is recorded when a shape comes again."""
    return 4 if isinstance(setup.engine, Stacked) else 1


def _rounds(
    setups: Sequence[Setup],
    batches: tuple[int, int] | None,
    timed: int = TIMED,
    tested: int = TESTED,
) -> Cost:
    """What rounds cost with `batches` of each client, of even and of odd number (None: all).

    Clients that train one after another are few then, and the cost is that of all of them.
    """
    began, warm = time.perf_counter(), _num_warm(setups[0])
    rounds, runs, times = warm + timed, [], 1.0
    for whole in setups:
        setup = _lasting(whole)
        if batches is not None and not side_by_side(setups):
            setup, times = _with_few(setup, batches[0])
        experiment = setup.experiment
        # Evaluated twice: the first time may compile.
        twice = replace(experiment.evaluate, every=rounds, at=(1,), twin=False)
        shown = replace(setup, experiment=replace(experiment, rounds=rounds, evaluate=twice))
        if batches is not None:
            most, most_of_odd = (count * experiment.local.batch_size for count in batches)
            parts = {name: _first(part, tested) for name, part in setup.parts.items()}
            federation = setup.federation.shortened(most, most_of_odd)
            shown = replace(shown, federation=federation, parts=parts, client_tests=None)
            if isinstance(setup.engine, Processes):  # else it predicts them here, and alone
                shown = replace(shown, engine=setup.engine.with_examples([*parts.values()]))
        state = begin(shown.network, shown.program, shown.federation, shown.device)
        runs.append(ActiveRun(shown, state))
    results = run_to_end(runs)
    took = time.perf_counter() - began
    # A point that diverges ends before the others: the last rounds are those of who is left.
    by_round: dict[int, list[Record]] = {}
    for record in (record for result in results for record in result.records):
        by_round.setdefault(record["round"], []).append(record)
    each = [by_round[round] for round in sorted(by_round)[-timed:]]
    # Shortened rounds are all alike: if one of them took longer, something else was going on.
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
    """With a learning rate at which hardly anything diverges: a rate takes no time.

    Who diverges leaves the stack, and rounds of those that are left are slow until they are
    recorded: they would be taken for all rounds.
    """
    experiment = setup.experiment
    if not isinstance(experiment.local.lr, float):
        return setup
    local = replace(experiment.local, lr=SMALL_RATE * experiment.local.lr)
    return _changed(setup, replace(experiment, local=local)) or setup


def _changed(setup: Setup, experiment: Experiment) -> Setup | None:
    """The same data and network in another experiment; None if its algorithm refuses that."""
    try:
        program = replace(setup.program, algorithm=make_algorithm(experiment))
    except ValueError:  # as one that needs more clients
        return None
    return replace(setup, experiment=experiment, program=program, _latest={})


def _with_few(setup: Setup, batches: int) -> tuple[Setup, float]:
    """With few clients a round, of one epoch each; and how many times as many there really are."""
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
    """How many times as many clients a round has as are timed."""
    # One for each worker would take as long as the slowest of them; of two, most have one to spare.
    cohort, few = setup.experiment.clients.cohort, 2 * max(setup.engine.num_workers, 2)
    cut = cohort >= 2 * few and setup.clock is None and not side_by_side([setup])
    return cohort / few if cut else 1.0


def side_by_side(setups: Sequence[Setup]) -> bool:
    return isinstance(setups[0].engine, Stacked)


def work_of(setups: Sequence[Setup]) -> Work:
    """Of a round: the mean over some, by what is drawn in them."""
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
    """How many examples an evaluation has, at most this many of each part."""
    return sum(len(part) if most is None else min(len(part), most) for part in setup.parts.values())


def _first(examples: Examples, count: int) -> Examples:
    rows = examples.rows
    return Examples(
        images=examples.images[:count] if rows is None else examples.images,
        labels=examples.labels[:count],
        columns={name: column[:count] for name, column in examples.columns.items()},
        rows=None if rows is None else rows[:count],
    )
