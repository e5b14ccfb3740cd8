"""Runs that differ in two settings: final accuracy as a matrix over the values of both."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

from fedlens.report.blocks import Heat
from fedlens.report.datasets import different_data
from fedlens.report.groups import Group, differing, written
from fedlens.runs.records import PART_NAMES, is_number


def grid_block(groups: Sequence[Group], part: str) -> Iterator[Heat]:
    """The matrix, if exactly two settings differ and more than half of its cells have a number.

    Accuracies are those of finished runs.
    """
    keys = _keys([one.settings for one in groups])
    if len(keys) != 2:
        return
    # The setting with more values has the columns, since there is more room across.
    down, across = sorted(keys, key=lambda key: len(_values(groups, key)))
    rows, columns = _values(groups, down), _values(groups, across)
    ends: dict[tuple[str, str], list[float]] = {}
    for one in groups:
        place = written(one.settings.get(down)), written(one.settings.get(across))
        final = [run.final(f"{part}_accuracy") for run in one.runs if run.status == "finished"]
        ends.setdefault(place, []).extend(filter(is_number, final))
    found = {place: fmean(values) for place, values in ends.items() if values}
    if len(rows) < 2 or 2 * len(found) <= len(rows) * len(columns):
        return
    runs = [run for one in groups for run in one.runs]
    told = different_data(runs)
    best = [] if told else [place for place in found if found[place] == max(found.values())]
    yield Heat(
        title=f"Final {PART_NAMES[part]} accuracy by {_short(down)} and {_short(across)}",
        name="accuracy_by_settings",
        caption=" ".join(_words(ends, len(runs), part, told)),
        values=[[found.get((row, column), math.nan) for column in columns] for row in rows],
        row_names=rows,
        column_names=columns,
        row_label=down,
        column_label=across,
        value_label=f"final {PART_NAMES[part]} accuracy",
        percent=True,
        digits=1,
        best=frozenset((rows.index(row), columns.index(column)) for row, column in best),
    )


def _words(
    ends: Mapping[tuple[str, str], Sequence[float]], num_runs: int, part: str, told: str
) -> Iterator[str]:
    """The sentences of the caption."""
    counts = {len(values) for values in ends.values() if values}
    over = ""
    if max(counts) > 1:
        number = f"{min(counts)} to {max(counts)}" if len(counts) > 1 else f"{max(counts)}"
        over = f", the mean over {number} runs"
    yield f"Accuracy on the {PART_NAMES[part]} examples at the end of each run, in percent{over}."
    yield f"{told}." if told else "The best is framed."
    missing = num_runs - sum(map(len, ends.values()))
    if missing:
        yield f"{missing} of {num_runs} runs did not finish, or were not evaluated: without them."


def _keys(many: Sequence[Mapping[str, Any]]) -> list[str]:
    """The settings that differ, without options that are determined by a name that differs."""
    found = differing(many)
    return [k for k in found if not any(_goes_with(k, name, many) for name in found)]


def _goes_with(key: str, name: str, many: Sequence[Mapping[str, Any]]) -> bool:
    """Whether `key` is an option of `name` and has one value for each value of `name`."""
    if not key.startswith(f"{name}."):
        return False
    by_name: dict[str, list[Mapping[str, Any]]] = {}
    for flat in many:
        by_name.setdefault(written(flat.get(name)), []).append(flat)
    return not any(key in differing(alike) for alike in by_name.values())


def _values(groups: Sequence[Group], key: str) -> list[str]:
    """The values of a setting as text: numbers sorted, others in the given order."""
    values = {written(value): value for one in groups for value in [one.settings.get(key)]}
    numbers = {name: float(value) for name, value in values.items() if is_number(value)}
    return sorted(numbers, key=numbers.__getitem__) if len(numbers) == len(values) else [*values]


def _short(key: str) -> str:
    return key.split(".")[-1]
