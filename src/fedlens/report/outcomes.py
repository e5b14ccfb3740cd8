"""Blocks about failing clients: the outcome of each in each round, accuracy by virtual time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from fedlens.config.names import OUTCOMES, REPORTED
from fedlens.report.blocks import Block, Curves, Line, Tiles
from fedlens.report.groups import Group
from fedlens.report.holdings import client_names
from fedlens.runs.records import PART_NAMES, Run, is_number, number

MOST_CLIENTS, MOST_ROUNDS = 200, 1000  # more cannot be distinguished in a picture
MOST_PICTURES = 4

MEANINGS = {
    REPORTED: "its update was taken",
    "surplus": "enough others reported before it, or too few for the round to count",
    "late": "it missed the deadline",
    "unavailable": "it was not there",
    "absent": "it never began",
    "dropped": "it stopped on its way",
    "nan": "it sent NaNs",
    "infinite": "it sent infinite numbers",
    "huge": "it sent an update of absurd length",
    "malformed": "it sent wrong shapes",
    "raised": "its program failed",
    "refused": "the site refused to train",
    "stale": "what it sent was for an earlier order",
    "foreign": "what it sent was of another experiment",
}


def outcome_blocks(groups: Sequence[Group], part: str) -> Iterator[Block]:
    """For runs with failures: outcomes by client and round, and accuracy by virtual time."""
    failing = [one for one in groups if any("failed" in row for row in _rounds(one.runs[0]))]
    for one in failing[:MOST_PICTURES]:
        of = f": {one.name}" if len(failing) > 1 else ""
        yield _strip(one.runs[0], f"Who reported{of}")
    clocked = [one for one in failing if one.runs[0].has("clock")]
    metric = f"{part}_accuracy"
    lines = [line for one in clocked if (line := _by_clock(one, metric)).x]
    if lines:
        yield Curves(
            title="Accuracy by virtual time",
            caption=f"{PART_NAMES[part].capitalize()} accuracy against the time of the virtual "
            "clock, on which clients compute and send as their devices do; of repeats, the first "
            "run.",
            lines=lines,
            x_label="virtual seconds",
            y_label=f"{PART_NAMES[part]} accuracy",
            percent=True,
        )


def _by_clock(one: Group, metric: str) -> Line:
    points = [
        (time, value)
        for row in one.runs[0].rounds
        if (time := number(row.get("clock"))) is not None
        and (value := number(row.get(metric))) is not None
    ]
    return Line(one.name, [x for x, _ in points], [y for _, y in points])


def _rounds(run: Run) -> list[dict[str, Any]]:
    """The records of a run, and that of the round where it stopped since too few reported."""
    stopped = run.summary.get("stopped_round")
    if not isinstance(stopped, dict) or not isinstance(stopped.get("round"), int):
        return run.rounds
    return [*run.rounds, stopped]


def _strip(run: Run, title: str) -> Tiles:
    everything, names = _rounds(run), client_names(run) or []
    rounds = _thinned(everything, MOST_ROUNDS)
    columns = [_outcomes(row) for row in rounds]
    everyone = sorted({client for column in columns for client in column})
    clients = _thinned(everyone, MOST_CLIENTS)
    named = [name for name in OUTCOMES if any(name in column.values() for column in columns)]
    legend = "; ".join(f"{name}: {MEANINGS[name]}" for name in named)
    some = [
        f"{len(shown)} of {total} {what} are shown"
        for shown, total, what in (
            (clients, len(everyone), "clients"),
            (rounds, len(everything), "rounds"),
        )
        if len(shown) < total
    ]
    caption = "What became of each client that was asked, round by round. " + legend + "."
    return Tiles(
        title=title,
        caption=caption + (f" {', '.join(some).capitalize()}." if some else ""),
        kinds=OUTCOMES,
        values=[[column.get(client) for column in columns] for client in clients],
        row_names=[names[client] if client < len(names) else str(client) for client in clients],
        column_names=[str(row["round"]) for row in rounds],
        row_label="client",
        column_label="round",
    )


def _outcomes(row: dict[str, Any]) -> dict[int, str]:
    """The outcome of each client in a record; one that failed and then reported has reported."""
    found: dict[int, str] = {}
    failed = row.get("failed")
    for name, clients in failed.items() if isinstance(failed, dict) else ():
        if name in OUTCOMES and isinstance(clients, list):
            found |= {int(client): name for client in clients if is_number(client)}
    taken = row.get("clients")
    for client in taken if isinstance(taken, list) else ():
        if is_number(client):
            found[int(client)] = REPORTED
    return found


def _thinned(values: Sequence[Any], most: int) -> list[Any]:
    """At most `most` of the values, evenly spaced."""
    if len(values) <= most:
        return list(values)
    return [values[len(values) * i // most] for i in range(most)]
