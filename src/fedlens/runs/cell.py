"""Notebooks: how far a run is and its curves, which change in place below the cell."""

from __future__ import annotations

import html
import time
from base64 import b64encode
from collections.abc import Mapping, Sequence
from typing import Any

from fedlens.runs.records import Record, is_number
from fedlens.runs.spans import until

Points = Sequence[tuple[float, float]]  # round, value
MEASURES = ("test_accuracy", "validation_accuracy", "train_loss")  # the first there is, is drawn
PAUSE = 10  # drawing again waits this many times as long as drawing took, and half a second


def points_of(records: Sequence[Record], measure: str) -> list[tuple[float, float]]:
    return [(one["round"], one[measure]) for one in records if is_number(one.get(measure))]


def picture(lines: Mapping[str, Points], measure: str) -> str:
    """Curves by name as they look on a page, in HTML; nothing if there is no point."""
    from fedlens.report.blocks import Curves, Line
    from fedlens.report.draw import pictures

    drawn = [
        Line(name, [at for at, _ in points], [value for _, value in points])
        for name, points in lines.items()
        if points
    ]
    if not drawn:
        return ""
    title = measure.replace("_", " ").capitalize()
    block = Curves(title=title, lines=drawn, percent=measure.endswith("accuracy"))
    code = b64encode(pictures(block, ["svg"])["svg"]).decode()
    return f'<img style="background: white" src="data:image/svg+xml;base64,{code}">'


class Cell:
    """What a notebook shows while a run, or the points of a sweep, are trained."""

    def __init__(self, title: str) -> None:
        from IPython import display as untyped

        display: Any = untyped
        self.title, self.line = title, ""
        self.html: Any = display.HTML
        self.records: dict[str, list[Record]] = {}  # by the point of a sweep
        self.handle: Any = display.display(display.HTML(""), display_id=True)
        self.due = 0.0

    def __call__(self, record: Record) -> None:
        if "round" in record:
            self.records.setdefault(str(record.get("point", self.title)), []).append(record)

    def advance(
        self, done: int, of: int | None, count: str, over: float | None, *measures: str
    ) -> None:
        """Show a line, and the curves so far, unless that was done a moment ago."""
        self.line = "  ".join(part for part in (count, *measures, until(over)) if part)
        if time.monotonic() >= self.due:
            self.show()

    def show(self) -> None:
        since = time.monotonic()
        told = {key for records in self.records.values() for one in records for key in one}
        measure = next((name for name in MEASURES if name in told), MEASURES[-1])
        lines = {name: points_of(records, measure) for name, records in self.records.items()}
        words = f"<b>{html.escape(self.title)}</b> {html.escape(self.line)}"
        self.handle.update(self.html(f"<div>{words}</div>{picture(lines, measure)}"))
        self.due = time.monotonic() + max(0.5, PAUSE * (time.monotonic() - since))
