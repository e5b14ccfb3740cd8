"""Runs as rows of a table, and tables as plain text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from unicodedata import combining, east_asian_width

from fedlens.report.numbers import NONE, format_number
from fedlens.runs.records import Run, primary_part, recorded_as, rounds_to
from fedlens.storage.reading import printable

Column = Callable[[Run, str], str]
"""The cell of a run; the second argument is the part that it was evaluated on."""
OPTIONAL = (
    "personal accuracy",
    "best accuracy (round)",
    "relative accuracy",
    "rounds to 90% of it",
    "worst tenth of clients",
    "AUROC",
    "average precision",
)
"""Columns that are shown only if a run has a value for them."""


def rows(runs: Sequence[Run]) -> tuple[list[str], list[list[str]]]:
    """The results table of runs as text cells: its header, and one row for each run."""
    part = primary_part(runs)
    columns = {name: [text(run, part) for run in runs] for name, text in COLUMNS.items()}
    shown = {k: v for k, v in columns.items() if k not in OPTIONAL or {*v} != {NONE}}
    return list(shown), [list(row) for row in zip(*shown.values(), strict=True)]


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


def _best(run: Run, part: str) -> str:
    best = run.best(f"{part}_accuracy")
    if part == "test" and run.is_personal:
        return NONE  # chosen by the images of the comparison
    return f"{format_number(best[0], True)} ({best[1]})" if best else NONE


def _rounds_to(run: Run, _: str) -> str:
    if run.final("relative_accuracy") is None:
        return NONE
    reached = rounds_to(run.rounds, 0.9, "relative_accuracy")
    return "never" if reached is None else str(reached)


def _rounds(run: Run, _: str) -> str:
    planned = run.experiment.get("rounds")
    short = isinstance(planned, int) and run.num_rounds < planned
    return f"{run.num_rounds} of {planned}" if short else str(run.num_rounds)


def _final(measure: str) -> Column:
    return lambda run, part: format_number(run.final(measure.format(part)), True)


def _total(column: str, unit: float) -> Column:
    return lambda run, _: decimal(None if (of := run.total(column)) is None else of / unit, 1)


COLUMNS: dict[str, Column] = {
    "run": lambda run, _: run.name,
    "final accuracy": _final("{}_accuracy"),
    "personal accuracy": _final("personal_accuracy"),
    "best accuracy (round)": _best,
    "final loss": lambda run, part: decimal(run.final(recorded_as([run], part, "loss"))),
    "macro F1": lambda run, part: decimal(run.final(f"{part}_f1")),
    "AUROC": lambda run, part: decimal(run.final(f"{part}_auroc")),
    "average precision": lambda run, part: decimal(run.final(f"{part}_average_precision")),
    "relative accuracy": _final("relative_accuracy"),
    "rounds to 90% of it": _rounds_to,
    "worst tenth of clients": _final("client_accuracy_worst_decile"),
    "algorithm": lambda run, _: run.algorithm,
    "rounds": _rounds,
    "MB up": _total("bytes_up", 1e6),
    "MB down": _total("bytes_down", 1e6),
    "seconds": _total("seconds", 1.0),
    "status": lambda run, _: run.status,
}
