"""Runs that differ in two settings: how well they ended, as a matrix of their values."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

from fedlens.report.grids import Heat
from fedlens.report.groups import Group, differing, written
from fedlens.runs.records import PART_NAMES, is_number


def grid_block(groups: Sequence[Group], part: str) -> Iterator[Heat]:
    """The matrix, if there are two settings that differ, and runs enough to fill half of it."""
    keys = _keys([one.settings for one in groups])
    if len(keys) != 2:
        return
    # The setting with more values goes across, where there is more room.
    down, across = sorted(keys, key=lambda key: len(_values(groups, key)))
    rows, columns = _values(groups, down), _values(groups, across)
    if len(rows) < 2 or 2 * len(groups) < len(rows) * len(columns):
        return
    ends = {_place(one.settings, down, across): one.finals(f"{part}_accuracy") for one in groups}
    found = {place: fmean(values) for place, values in ends.items() if values}
    if not found:
        return
    best = max(found.values())
    seeds = ", the mean over seeds" if any(len(one.runs) > 1 for one in groups) else ""
    broken = sum(run.status == "diverged" for one in groups for run in one.runs)
    told = f" {broken} runs diverged: theirs is the last before that." if broken else ""
    yield Heat(
        title=f"Final {PART_NAMES[part]} accuracy by {_short(down)} and {_short(across)}",
        name="accuracy_by_settings",
        caption=f"Accuracy on the {PART_NAMES[part]} examples at the end of each run, in "
        f"percent{seeds}. The best is framed.{told}",
        values=[[found.get((row, column), math.nan) for column in columns] for row in rows],
        row_names=rows,
        column_names=columns,
        row_label=down,
        column_label=across,
        value_label=f"final {PART_NAMES[part]} accuracy",
        percent=True,
        digits=1,
        best=frozenset(
            (rows.index(row), columns.index(column))
            for (row, column), value in found.items()
            if value == best
        ),
    )


def _keys(many: Sequence[Mapping[str, Any]]) -> list[str]:
    """The settings that differ, but for those that an algorithm has and others have not."""
    by_algorithm: dict[str, list[Mapping[str, Any]]] = {}
    for flat in many:
        by_algorithm.setdefault(written(flat.get("algorithm")), []).append(flat)
    chosen = {key for alike in by_algorithm.values() for key in differing(alike)}
    return [k for k in differing(many) if k in chosen or not k.startswith("algorithm.")]


def _values(groups: Sequence[Group], key: str) -> list[str]:
    """The values of a setting: numbers from the least to the greatest, others as they come."""
    values = {written(value): value for one in groups for value in [one.settings.get(key)]}
    numbers = {name: float(value) for name, value in values.items() if is_number(value)}
    return sorted(numbers, key=numbers.__getitem__) if len(numbers) == len(values) else [*values]


def _place(settings: Mapping[str, Any], down: str, across: str) -> tuple[str, str]:
    return written(settings.get(down)), written(settings.get(across))


def _short(key: str) -> str:
    return key.split(".")[-1]
