"""Runs as rows of a table, and tables as plain text."""

from __future__ import annotations

from collections.abc import Sequence
from unicodedata import combining, east_asian_width

from fedlens.report.numbers import NONE, format_number
from fedlens.runs.budgets import rounds_to
from fedlens.runs.records import Run, primary_part, recorded_as
from fedlens.storage.reading import printable

HEADER = [
    "run",
    "final accuracy",
    "best accuracy (round)",
    "final loss",
    "macro F1",
    "algorithm",
    "rounds",
    "MB up",
    "MB down",
    "seconds",
    "status",
]
MORE = ["relative accuracy", "rounds to 90% of it", "worst tenth of clients"]
"""Columns after those of the final model; each is shown only if a run has a value for it."""


def rows(runs: Sequence[Run]) -> tuple[list[str], list[list[str]]]:
    """The results table of runs as text cells: its header, and one row for each run."""
    more = [_more(run) for run in runs]
    shown = [i for i in range(len(MORE)) if any(cells[i] != NONE for cells in more)]
    column, part = HEADER.index("algorithm"), primary_part(runs)
    body = [_row(run, part) for run in runs]
    for row, cells in zip(body, more, strict=True):
        row[column:column] = [cells[i] for i in shown]
    return [*HEADER[:column], *(MORE[i] for i in shown), *HEADER[column:]], body


def table(
    header: Sequence[str], body: Sequence[Sequence[str]], most_columns: int | None = None
) -> str:
    """The table as plain text, with aligned columns.

    A table wider than `most_columns` characters is split: the remaining columns follow below,
    with the first column repeated.
    """
    header, *body = [[printable(word) for word in row] for row in (header, *body)]
    widths = [max(columns_of(row[i]) for row in (header, *body)) for i in range(len(header))]
    lines = (header, ["-" * width for width in widths], *body)
    parts: list[list[int]] = [[0]]
    for column in range(1, len(header)):
        wide = sum(widths[i] + 2 for i in parts[-1]) + widths[column]
        if most_columns is not None and wide > most_columns and len(parts[-1]) > 1:
            parts.append([0])
        parts[-1].append(column)
    return "\n\n".join(
        "\n".join(
            "  ".join(line[i] + " " * (widths[i] - columns_of(line[i])) for i in part).rstrip()
            for line in lines
        )
        for part in parts
    )


def columns_of(text: str) -> int:
    """The width of a text on a terminal: wide characters count 2, combining marks count 0."""
    return sum(
        0 if combining(character) else 1 + (east_asian_width(character) in "WF")
        for character in text
    )


def decimal(value: float | None, digits: int = 3) -> str:
    """A number as text with fixed digits; from 1e6 on with an exponent (diverged losses)."""
    if value is None:
        return NONE
    return f"{value:.{digits}f}" if abs(value) < 1e6 else f"{value:.1e}"


def _row(run: Run, part: str) -> list[str]:
    best = run.best(f"{part}_accuracy")
    planned = run.experiment.get("rounds")
    short = isinstance(planned, int) and run.num_rounds < planned
    up, down = (run.total(column) for column in ("bytes_up", "bytes_down"))
    return [
        run.name,
        format_number(run.final(f"{part}_accuracy"), True),
        f"{format_number(best[0], True)} ({best[1]})" if best else NONE,
        decimal(run.final(recorded_as([run], part, "loss"))),
        decimal(run.final(f"{part}_f1")),
        run.algorithm,
        f"{run.num_rounds} of {planned}" if short else str(run.num_rounds),
        decimal(None if up is None else up / 1e6, 1),
        decimal(None if down is None else down / 1e6, 1),
        decimal(run.total("seconds"), 1),
        run.status,
    ]


def _more(run: Run) -> list[str]:
    relative = run.final("relative_accuracy")
    reached = rounds_to(run.rounds, 0.9, "relative_accuracy")
    return [
        format_number(relative, True),
        NONE if relative is None else "never" if reached is None else str(reached),
        format_number(run.final("client_accuracy_worst_decile"), True),
    ]
