"""Curves of scheduled settings by round, for those that changed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fedlens.report.blocks import Curves
from fedlens.report.groups import Group, curve


def schedule_blocks(groups: Sequence[Group]) -> Iterator[Curves]:
    runs = [run for one in groups for run in one.runs]
    recorded = dict.fromkeys(key for run in runs for row in run.rounds[:1] for key in row)
    for key in recorded:
        if key != "lr" and "." not in key:
            continue
        if all(len(set(run.curve(key)[1])) < 2 for run in runs):
            continue
        what = "local.lr" if key == "lr" else key
        yield Curves(
            title=f"Schedule of {what}",
            caption=f"What {what} was in each round.",
            lines=[line for one in groups if (line := curve(one, key)).x],
            y_label=what,
        )
