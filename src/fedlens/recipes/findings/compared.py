"""The statistics of all findings, fixed before anything is read.

A run counts by its read-out: the mean test accuracy of its last ten evaluations. Runs are paired by
seed. Intervals are Student's, and hold together for all comparisons of a table (Bonferroni);
p-values are corrected for the same number (Holm).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from statistics import fmean

from fedlens.recipes.page import mean_of
from fedlens.recipes.recipe import Measured, Results
from fedlens.report.blocks import Intervals, Table
from fedlens.report.numbers import NONE
from fedlens.report.pairs import CONFIDENCE, Estimate, corrected, picture_of
from fedlens.runs.records import Run, settings

LAST = 10  # evaluations
TITLE, ENDS = "What differs", "Where they end"

Sum = Mapping[str, float]
"""A sum of cells, each with its factor: {"a": 1, "b": -1} is how far a is ahead of b."""


def evaluated(run: Run) -> list[float]:
    """The test accuracies in every `evaluate.every`-th round: some runs have more in between."""
    every = int(settings(run.experiment)["evaluate.every"])
    return [y for round, y in zip(*run.curve("test_accuracy"), strict=True) if round % every == 0]


def read_out(run: Run) -> float:
    """NaN for a run that diverged: it has no end."""
    values = evaluated(run)[-LAST:]
    return math.nan if run.status == "diverged" or not values else fmean(values)


ReadOut = Callable[[Run], float]


def ahead(one: str, other: str) -> Sum:
    return {one: 1.0, other: -1.0}


def by_seed(results: Results, sum: Sum, read_out: ReadOut) -> dict[int, float]:
    """The sum for each seed that all of its cells were run with."""
    read = [
        {int(run.manifest["seed"]): factor * read_out(run) for run in results.runs[cell]}
        for cell, factor in sum.items()
    ]
    seeds = set.intersection(*map(set, read))
    return {seed: math.fsum(one[seed] for one in read) for seed in sorted(seeds)}


def compared(
    results: Results,
    sums: Mapping[str, Sum],
    title: str = TITLE,
    read_out: ReadOut = read_out,
) -> Table:
    """The table of comparisons, by their names."""
    rows = [
        [name, *(one.cells() if one else ["diverged", NONE, NONE, str(count)])]
        for name, (count, one) in estimates(results, sums, read_out).items()
    ]
    header = ("comparison", "points", "interval", "p (Holm)", "n")
    return Table(title=title, header=header, rows=rows)


def estimates(
    results: Results, sums: Mapping[str, Sum], read_out: ReadOut = read_out
) -> dict[str, tuple[int, Estimate | None]]:
    """Of each comparison that has runs: their number, and what differs if none diverged."""
    found = {name: [*by_seed(results, sum, read_out).values()] for name, sum in sums.items()}
    shown = {name: values for name, values in found.items() if values}
    sound = {name: values for name, values in shown.items() if all(map(math.isfinite, values))}
    told = corrected(sound, 1 - (1 - CONFIDENCE) / max(len(shown), 1))
    return {name: (len(values), told.get(name)) for name, values in shown.items()}


def levels(results: Results, cells: Iterable[str]) -> Table:
    """The read-outs of cells: mean and deviation over seeds."""
    rows = [
        [cell, mean_of(Measured.of([*map(read_out, runs)])), str(len(runs))]
        for cell in cells
        if (runs := results.runs[cell])
    ]
    return Table(title=ENDS, header=("runs", "accuracy, %", "n"), rows=rows)


def pictured(results: Results, sums: Mapping[str, Sum]) -> Intervals:
    """The comparisons as a picture."""
    nothing = Estimate(0, math.nan, None)
    told = estimates(results, sums)
    found = {name: one or nothing for name, (_, one) in told.items()}
    return picture_of(found, title="How far ahead")
