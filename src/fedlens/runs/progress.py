"""What a person sees while something takes its time: how far it is, and how long is left."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from fedlens.reading import printable

if TYPE_CHECKING:
    from fedlens.runs.active import Watch
    from fedlens.runs.summary import Record

PLAIN_SECONDS = 2.0  # between two lines where there is no terminal


@contextmanager
def rounds(title: str, total: int, done: int = 0) -> Iterator[Watch]:
    """A watch over a run: a bar on a terminal, else a line every few seconds; both on stderr."""
    title = printable(title)
    if sys.stderr.isatty():
        with _bar(title, total, done, "round {task.completed}/{task.total}") as advance:
            evaluated = ""

            def show(record: Record) -> None:
                nonlocal evaluated
                if is_aside(record):
                    advance(done if "twin" in record else total, _aside(record))
                    return
                evaluated = _evaluated(record, evaluated)
                advance(_at(record), _trained(record) + evaluated)

            yield show
    else:
        yield _lines(title, total, done)


@contextmanager
def shown(wanted: bool | None, title: str, total: int, done: int = 0) -> Iterator[Watch | None]:
    """A watch over a run started from Python: if nobody says, where there is somebody to see it."""
    in_notebook = "ipykernel" in sys.modules
    if wanted is False or (wanted is None and not sys.stderr.isatty() and not in_notebook):
        yield None
    else:
        with rounds(title, total, done) as watch:
            yield watch


def all_of(*watches: Watch | None) -> Watch:
    """One watch that calls several."""

    def watch_all(record: Record) -> None:
        for watch in watches:
            if watch is not None:
                watch(record)

    return watch_all


@contextmanager
def transfer(title: str) -> Iterator[Any]:
    """A watch over a download: called with the bytes done and the bytes in all."""
    title = printable(title)
    if sys.stderr.isatty():
        with _bar(title, None, 0, "{task.percentage:>3.0f}%") as advance:
            yield lambda done, total: advance(done, f"{done / 1e6:.1f} MB", total)
    else:
        last_print = [time.monotonic()]

        def show(done: int, total: int | None) -> None:
            if time.monotonic() - last_print[0] >= PLAIN_SECONDS or done == total:
                last_print[0] = time.monotonic()
                of = f" of {total / 1e6:.1f}" if total else ""
                print(f"{title}: {done / 1e6:.1f}{of} MB", file=sys.stderr, flush=True)

        yield show


@contextmanager
def figures() -> Iterator[Any]:
    """A watch over the figures of a page, on a terminal: called with those drawn, and with all."""
    if not sys.stderr.isatty():
        yield None
        return
    with _bar("figures", None, 0, "{task.completed}/{task.total}") as advance:
        yield lambda done, total: advance(done, "", total)


def _lines(title: str, total: int, done: int) -> Watch:
    started = last_print = aside_since = time.monotonic()
    evaluated = ""

    def show(record: Record) -> None:
        nonlocal started, last_print, aside_since, evaluated
        now = time.monotonic()
        if is_aside(record):
            number, of = _passes(record)
            aside_since = now if number == 1 else aside_since
            if now - last_print >= PLAIN_SECONDS or number in (1, of):
                last_print = now
                left = (now - aside_since) / max(number - 1, 1) * (of - number)
                about = f"  about {span(left)} left" if 1 < number < of else ""
                print(f"{title}: {_aside(record)}{about}", file=sys.stderr, flush=True)
            started = now  # the rounds begin when the twin is done
            return
        evaluated, at = _evaluated(record, evaluated), _at(record)
        if now - last_print < PLAIN_SECONDS and at not in (done + 1, total):
            return
        last_print = now
        left = (now - started) / (at - done) * (total - at)
        remaining = f"  about {span(left)} left" if at < total else ""
        line = f"{title}: round {at}/{total}  {_trained(record)}{evaluated}{remaining}"
        print(line, file=sys.stderr, flush=True)

    return show


@contextmanager
def _bar(title: str, total: int | None, done: int, counter: str) -> Iterator[Any]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn(counter),
        TextColumn("{task.fields[measures]}", markup=False),
        TimeRemainingColumn(compact=True),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(title, total=total, completed=done, measures="")

        def advance(completed: int, measures: str, of: int | None = total) -> None:
            progress.update(task, completed=completed, measures=measures, total=of)

        yield advance


def is_aside(record: Record) -> bool:
    """Whether it tells of what is trained besides the run: its twin, or clients by themselves."""
    return "twin" in record or "alone" in record


def _passes(record: Record) -> tuple[int, int]:
    return record["twin" if "twin" in record else "alone"], record["of"]


def _aside(record: Record) -> str:
    number, of = _passes(record)
    if "twin" in record:
        return f"training its centralised twin, pass {number}/{of}  {_trained(record)}"
    return f"training clients by themselves, pass {number}/{of}"


def _at(record: Record) -> int:
    """How many rounds are done, those of a sweep's other points included."""
    return int(record["done"] if "done" in record else record["round"])


def _trained(record: Record) -> str:
    point = f"{printable(record['point'])}  " if "point" in record else ""
    return f"{point}train loss {record['train_loss']:.3f}"


def _evaluated(record: Record, before: str) -> str:
    """The last evaluation: this record's, else that of the run before."""
    parts = [part for part in ("test", "validation") if f"{part}_accuracy" in record]
    if not parts:
        return "" if "point" in record else before
    return "".join(f"  {part} accuracy {100 * record[f'{part}_accuracy']:.1f}%" for part in parts)


def span(seconds: float) -> str:
    """A time in s, min or h."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
