"""Pairs runs of variants on the same task by seed, and tests which is better (Student's t-test)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations
from statistics import fmean, stdev
from typing import Any, TypeVar

from fedlens.evaluation.intervals import holm, p_value
from fedlens.report.blocks import Intervals, Marks
from fedlens.report.groups import (
    Group,
    differing,
    in_words,
    names_by_difference,
    seed_of,
    without_seeds,
)
from fedlens.report.numbers import NONE
from fedlens.runs.records import PART_NAMES, Run

K = TypeVar("K")

SURE = 0.05  # a difference with a p-value below this is significant
CONFIDENCE = 0.95
OWN = "client_accuracy_mean"  # of clients' own models, or of the one model, on clients' own tests


@dataclass(frozen=True)
class Estimate:
    """A mean with its confidence interval, and the p-value of the hypothesis that it is 0."""

    n: int
    mean: float
    std: float | None  # of the sample; this and the three fields below are None if n is 1
    low: float | None = None
    high: float | None = None
    p: float | None = None  # two-sided; None also if all values are equal

    @property
    def between(self) -> str:
        """The ends of the interval, in points."""
        return NONE if self.low is None else f"{points(self.low)} to {points(self.high)}"

    @property
    def chance(self) -> str:
        return NONE if self.p is None else format_p(self.p)

    def cells(self) -> list[str]:
        """The mean, the interval, the p-value and n, for a row of a table."""
        return [points(self.mean), self.between, self.chance, str(self.n)]

    def words(self) -> str:
        """The mean and, if it is known, the interval, in points."""
        return points(self.mean) + (f" ({self.between})" if self.low is not None else "")


@dataclass(frozen=True)
class Task:
    """The same work under several variants; each has its finished runs, one per seed."""

    name: str  # empty if there is only one task
    variants: tuple[Group, ...]


@dataclass(frozen=True)
class Pair:
    """Two variants on one task, seed by seed."""

    task: str
    one: str
    other: str
    seeds: tuple[str, ...]  # the common seeds of both
    difference: Estimate | None  # `one` minus `other`; None without a common seed
    measure: str  # what differs: mean test accuracy of the last 3 evaluations, say
    p: float | None = None  # corrected for the number of pairs

    @property
    def is_sure(self) -> bool:
        return is_sure(self.p)

    def ahead(self) -> tuple[str, str, Estimate]:
        """The better variant, the other one, and how far it is ahead, with the corrected p."""
        assert self.difference is not None, "they share a seed"
        found = replace(self.difference, p=self.p)
        if found.mean >= 0:
            return self.one, self.other, found
        low, high = (None if end is None else -end for end in (found.high, found.low))
        return self.other, self.one, replace(found, mean=-found.mean, low=low, high=high)

    def words(self) -> str:
        """Whether `one` is better than `other`, in a sentence or two."""
        where = f"On {self.task}: " if self.task else ""
        if self.difference is None:
            return (
                f"{where}{self.one} and {self.other} share no seed, so their runs are not paired "
                "and it is not known which is better: run both with the same seeds."
            )
        first, second, far = self.ahead()
        n, mean, ahead = far.n, far.mean, f"{points(far.mean)} points of {self.measure}"
        if n == 1:
            above = f"{ahead} above" if mean else f"with the same {self.measure} as"
            return (
                f"{where}{first} came out {above} {second} with seed {self.seeds[0]}. One "
                "pair of runs may differ by chance (n = 1): run both with more seeds."
            )
        if self.p is None:
            same = f"always {ahead} above {second}" if mean else f"always equal to {second}"
            return f"{where}{first} was {same} (n = {n}): there is no spread to test against."
        numbers = f"95% confidence interval {far.between} points, {format_p(self.p)}, n = {n}"
        if self.is_sure:
            return f"{where}{first} is better than {second}, by {ahead} ({numbers})."
        return (
            f"{where}It cannot be said that {first} is better than {second}: the difference of "
            f"{ahead} may be chance ({numbers})."
        )


def is_sure(p: float | None) -> bool:
    """Whether a difference is significant."""
    return p is not None and p < SURE


def check_target(target: float | None, where: str) -> None:
    """Raise if the target is not a share above 0, up to 1; 80% is 0.8."""
    if target is not None and not 0 < target <= 1:
        raise ValueError(f"{where} is {target:g}: choose a share above 0, up to 1 (80% is 0.8)")


def tasks(
    runs: Sequence[Run], by: Sequence[str] = (), names: Sequence[str] | None = None
) -> list[Task]:
    """Group runs by task, and each task's runs by variant, in the given order.

    Variants differ in the settings under the keys `by`, or are given for each run in `names`. Tasks
    differ in all other settings except seeds. With neither `by` nor `names`, variants differ in
    their algorithm, or, if no task has two of them, in any setting.
    """
    flat = [without_seeds(run) for run in runs]
    if names is not None:
        of_name = ([o for o, n in zip(flat, names, strict=True) if n == one] for one in set(names))
        within = {key for alike in of_name for key in differing(alike)}
        return _into_tasks(runs, flat, names, [key for key in differing(flat) if key in within])
    differ = differing(flat)
    tops = by or ["algorithm"]
    chosen = [key for key in differ if any(f"{key}.".startswith(f"{top}.") for top in tops)]
    if by and not chosen:
        others = ", ".join(differ) or "their seeds alone"
        raise ValueError(f"the runs do not differ in {', '.join(by)}: they differ in {others}")
    between = [key for key in differ if key not in chosen]
    # If tasks differ in their algorithms, these are no part of a variant's name.
    named = chosen if "algorithm" in between else dict.fromkeys(["algorithm", *chosen])
    found = _into_tasks(runs, flat, in_words(flat, named), between)
    if not by and all(len(task.variants) < 2 for task in found):
        found = _into_tasks(runs, flat, names_by_difference(flat), [])
    return found


@dataclass(frozen=True)
class Score:
    """By what runs are compared: the mean of their last evaluations, so not by one that is noisy.

    It is that of accuracy or, where images may have several labels, of average precision.
    By default these are the last fifth of the evaluations that every run has, 10 at most: late
    enough for models that learn no more, and enough of them to average out ups and downs. If a run
    has clients with models of their own, what counts is the accuracy of these on the clients' own
    test images after the last round, beside that of the one model of other runs.
    """

    metric: str
    last: int  # the number of evaluations
    words: str

    @classmethod
    def of(cls, runs: Sequence[Run], part: str, last: int | None) -> Score:
        several = all("multi_label" in run.manifest for run in runs)
        what = "average precision" if several else "accuracy"
        metric = f"{part}_{what.replace(' ', '_')}"
        if any(run.is_personal for run in runs) and all(run.final(OWN) is not None for run in runs):
            if last not in (None, 1):
                raise ValueError(f"last is {last}, but own models count after the last round: 1")
            return cls(OWN, 1, "final accuracy on clients' own test images")
        fewest = min(len(_values(run, metric)) for run in runs)
        if last is not None and not 1 <= last <= max(fewest, 1):
            raise ValueError(
                f"last is {last}: choose 1 to {fewest}, the fewest evaluations of a run"
            )
        last = last or min(max(fewest // 5, 1), 10)
        what = f"{PART_NAMES[part]} {what}"
        words = f"mean {what} of the last {last} evaluations" if last > 1 else f"final {what}"
        return cls(metric, last, words)

    def __call__(self, run: Run) -> float | None:
        if self.metric == OWN and run.is_personal:
            return run.final("personal_accuracy")
        values = _values(run, self.metric)[-self.last :]
        return fmean(values) if len(values) > 1 else run.final(self.metric)


def _values(run: Run, metric: str) -> list[float]:
    """What was measured after training began."""
    points = zip(*run.curve(metric), strict=True)
    return [value for round, value in points if round and math.isfinite(value)]


def pairs(all_tasks: Sequence[Task], score: Score) -> list[Pair]:
    """All pairs of variants of every task; p-values are corrected for their number (Holm)."""
    found = []
    for task in all_tasks:
        for one, other in combinations(task.variants, 2):
            scored = [
                (str(seed_of(a)[0] or 0), left - right)
                for a, b in by_seed(one, other)
                if (left := score(a)) is not None and (right := score(b)) is not None
            ]
            seeds = tuple(seed for seed, _ in scored)
            difference = estimate([each for _, each in scored]) if scored else None
            found.append(Pair(task.name, one.name, other.name, seeds, difference, score.words))
    corrected = holm([pair.difference.p if pair.difference else None for pair in found])
    return [replace(pair, p=p) for pair, p in zip(found, corrected, strict=True)]


def by_seed(one: Group, other: Group) -> list[tuple[Run, Run]]:
    """Pairs of runs of two variants with the same seeds."""
    of_other = {seed_of(run): run for run in other.runs}
    return [(run, of_other[seed_of(run)]) for run in one.runs if seed_of(run) in of_other]


def ranks(scores: Sequence[float]) -> list[float]:
    """The rank of each score, 1 for the highest; equal scores share the mean of their ranks."""
    return [
        1 + sum(other > score for other in scores) + (scores.count(score) - 1) / 2
        for score in scores
    ]


def points(value: float | None, sign: str = "") -> str:
    """A difference of fractions in percentage points; with the `sign` "+", it always has one."""
    return NONE if value is None else f"{100 * value:{sign}.2f}".replace("-", "−")


def format_p(p: float) -> str:
    return f"p = {p:.3f}" if p >= 0.001 else "p < 0.001"


def pair_rows(paired: Sequence[Pair]) -> tuple[list[str], list[list[str]]]:
    """The differences as a table (header, rows): the better variant first, with its p-value."""
    tasked = any(pair.task for pair in paired)
    rows = []
    for pair in paired:
        cells = [pair.one, pair.other, NONE, NONE, NONE, "0"]
        if pair.difference is not None:
            first, second, far = pair.ahead()
            p = NONE if pair.p is None else format_p(pair.p).removeprefix("p ").removeprefix("= ")
            cells = [first, second, points(far.mean), far.between, p, str(far.n)]
        rows.append([*cells, *([pair.task] if tasked else [])])
    p = "p (Holm)" if len(paired) > 1 else "p"  # intervals are not corrected
    header = ["first", "second", "points ahead", "95% confidence interval", p, "n"]
    return [*header, *(["task"] if tasked else [])], rows


def picture_of(found: Mapping[str, Estimate], what: str = "difference", **more: Any) -> Intervals:
    """Differences in points, a row each; those that may be chance are grey."""
    sides = ([getattr(one, side) for one in found.values()] for side in ("mean", "low", "high"))
    marks = ([None if value is None else 100 * value for value in side] for side in sides)
    more = {"x_label": "points of accuracy", "digits": 2, **more}
    return Intervals(
        rows=list(found),
        series=[Marks(what, *marks)],
        zero=True,
        faint=frozenset(i for i, one in enumerate(found.values()) if not is_sure(one.p)),
        **more,
    )


def unequal_rounds(all_tasks: Sequence[Task]) -> str:
    """A sentence about tasks whose runs differ in rounds; empty if there are none."""
    found = []
    for task in all_tasks:
        rounds = {group.name: [run.num_rounds for run in group.runs] for group in task.variants}
        if len({count for some in rounds.values() for count in some}) > 1:
            told = (
                f"{name} {min(some)}" + (f" to {max(some)}" if len({*some}) > 1 else "")
                for name, some in rounds.items()
            )
            found.append(f"{', '.join(told)}{f' ({task.name})' if task.name else ''}")
    if not found:
        return ""
    return f"Runs differ in rounds, and each is compared at its own end: {'; '.join(found)}."


def _into_tasks(
    runs: Sequence[Run],
    flat: Sequence[dict[str, Any]],
    variants: Sequence[str],  # of each run
    between: Sequence[str],  # the settings in which tasks differ
) -> list[Task]:
    def label(key: str) -> str:
        own = key.startswith("algorithm.")
        return key.split(".")[-1] if own else key.removeprefix("clients.")

    sorted_in: dict[str, dict[str, list[Run]]] = {}
    named = in_words(flat, between, ("dataset", "algorithm"), label)
    for run, task, variant in zip(runs, named, variants, strict=True):
        sorted_in.setdefault(task, {}).setdefault(variant, []).append(run)
    found = []
    for task, by_variant in sorted_in.items():
        for members in by_variant.values():
            seeds = [seed_of(run) for run in members]
            if len(set(seeds)) < len(seeds):
                twice = next(run for run in members if seeds.count(seed_of(run)) > 1)
                raise ValueError(
                    f"{twice.folder} was run twice with seed {seed_of(twice)[0]}: name it once"
                )
        groups = (Group(v, tuple(m), without_seeds(m[0])) for v, m in by_variant.items())
        found.append(Task(task, tuple(groups)))
    return found


def estimate(values: Sequence[float], confidence: float = CONFIDENCE) -> Estimate:
    """Estimate the mean of `values`, assuming draws from a normal distribution."""
    n, mean = len(values), fmean(values)
    if n == 1:
        return Estimate(1, mean, None)
    std = stdev(values)
    half = quantile(confidence, n - 1) * std / math.sqrt(n)
    p = p_value(mean / (std / math.sqrt(n)), n - 1) if std else None
    return Estimate(n, mean, std, mean - half, mean + half, p)


def corrected(
    found: Mapping[K, Sequence[float]], confidence: float = CONFIDENCE
) -> dict[K, Estimate]:
    """Estimates of means by key, whose p-values are corrected for their number (Holm)."""
    made = {key: estimate(values, confidence) for key, values in found.items()}
    ps = holm([one.p for one in made.values()])
    return {key: replace(one, p=p) for (key, one), p in zip(made.items(), ps, strict=True)}


@cache  # called for every round of a curve
def quantile(confidence: float, dof: float) -> float:
    """The t such that a share `confidence` of Student's distribution lies within ± t."""
    low, high = 0.0, 1.0
    while 1 - p_value(high, dof) < confidence:
        high *= 2
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if 1 - p_value(middle, dof) < confidence else (low, middle)
    return (low + high) / 2
