"""Progress: callbacks that are told of it, and displays of how far and how long it is."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ContextDecorator, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from inspect import iscoroutinefunction, isgeneratorfunction, signature
from typing import TYPE_CHECKING, Any

from fedlens.data.places import Counted
from fedlens.runs.cell import Cell
from fedlens.runs.records import Record
from fedlens.runs.spans import until
from fedlens.storage.reading import printable

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

OUTSIDE = {  # progress outside of rounds, in words for a line and for a bar
    "decoded": ("reading images", "reading images"),
    "planned": ("counting what clients train on, client", "twin: client"),
    "twin": ("training its centralised twin, pass", "twin: pass"),
    "tuned": ("fine-tuning each client's model, pass", "fine-tuning: pass"),
    "baseline": ("training FedAvg to compare, round", "FedAvg: round"),
    "alone": ("training clients by themselves, pass", "alone: pass"),
    "drawn": ("resampling examples for intervals,", "intervals:"),
}
WITHIN = {  # progress within a round
    "trained": ("clients trained", "trained"),
    "stepped": ("steps of a client", "steps"),
    "tested": ("images tested", "tested"),
}
OFTEN = ("planned", *WITHIN)  # told only to a `Watching`

Watch = Callable[[Record], None]
"""A callback for each record of a run, and for progress outside of rounds (`OUTSIDE`)."""


@dataclass(frozen=True)
class Watching:
    """A watch that also receives progress within a round: a key of `WITHIN`, and the total `of`."""

    watch: Watch

    def __call__(self, record: Record) -> None:
        self.watch(record)


def inform(watch: Watch | None, record: Record) -> None:
    """Call a watch, if there is one, with a record or with progress that is for it."""
    is_for_all = not any(key in record for key in OFTEN)
    if watch is not None and (is_for_all or isinstance(watch, Watching)):
        watch(record)


def all_of(*watches: Watch | None) -> Watching:
    """One watch that tells several."""

    def tell_all(record: Record) -> None:
        for watch in watches:
            inform(watch, record)

    return Watching(tell_all)


def expect_watch(given: Any, what: str) -> None:
    """Raise before anything runs if `given` cannot be called with a record."""
    if given is None:
        return
    if isinstance(given, ContextDecorator):  # callable, but a call would do nothing
        raise ValueError(f"{what} is given a watch that was not begun: use with ... as watch")
    if not callable(given) or not _takes_one(given):
        name = getattr(given, "__name__", f"of type {type(given).__name__}")
        raise ValueError(f"{what} is given a watch {name}: give a function of one record")


def _takes_one(given: Callable[..., Any]) -> bool:
    """Whether a call with one record works, and runs the function."""
    if isinstance(given, type) or iscoroutinefunction(given) or isgeneratorfunction(given):
        return False
    try:
        signature(given).bind({})
    except TypeError:
        return False
    except ValueError:  # unknown for a function that is not written in Python
        pass
    return True


PLAIN_SECONDS = 2.0  # between two lines where there is no terminal, unless they are evaluations
WITHIN_SECONDS = 10.0  # between two lines within one round, without a terminal
BAR_SECONDS = 0.5  # after which a bar appears
ECHO_COLUMNS = 4  # left free to the right of a bar: room for ^C twice


@contextmanager
def in_rounds(title: str, total: int, done: int = 0) -> Iterator[Watching]:
    """A watch over a run: curves in a notebook; on stderr a bar, or a line every few seconds."""
    title = printable(title)
    if _in_notebook():
        cell = Cell(title)
        try:
            yield all_of(cell, Watching(_Rounds(title, total, done, cell.advance)))
        finally:
            cell.show()
        return
    with _bar(title) if _draws_bars() else nullcontext() as advance:
        yield Watching(_Rounds(title, total, done, advance))


@contextmanager
def shown(wanted: bool | None, kind: Any, *about: Any) -> Iterator[Any]:
    """The progress display `kind` for calls from Python, or None.

    With `wanted` None, it is shown in a terminal and in a notebook.
    """
    if wanted is False or (wanted is None and not sys.stderr.isatty() and not _in_notebook()):
        yield None
    else:
        with kind(*about) as watch:
            yield watch


def _draws_bars() -> bool:
    """Whether stderr is a terminal that can overwrite its lines, unlike Emacs's shell."""
    is_dumb = os.environ.get("TERM", "").lower() in ("dumb", "unknown")
    return sys.stderr.isatty() and not is_dumb


def _in_notebook() -> bool:
    """Whether this runs in a Jupyter kernel; some programs only import IPython."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")


def decoding(watch: Watch | None) -> Counted | None:
    """A callback that reports decoded images to the watch of a run, before its first round."""
    if watch is None:
        return None
    return lambda done, total: watch({"decoded": done, "of": total})


@contextmanager
def working(title: str) -> Iterator[None]:
    """Show that something without a count is running, and for how long."""
    title = printable(title)
    if not _draws_bars():
        print(f"{title} ...", file=sys.stderr, flush=True)
        yield
        return
    with _bar(title, transient=True):
        yield


def items(done: int, total: int | None) -> str:
    return f"{done:,}/{total:,}"


def percent(done: int, total: int | None) -> str:
    return f"{done / (total or 1):.0%}"


def megabytes(done: int, total: int | None) -> str:
    of = f" of {total / 1e6:.1f}" if total else ""
    return f"{done / 1e6:.1f}{of} MB"


@contextmanager
def counted(
    title: str, written: Callable[[int, int | None], str] = items
) -> Iterator[Callable[..., None]]:
    """A watch over countable items: a bar on a terminal, else a line every few seconds.

    It is called with the number done, the total and, if there are several steps, the name of the
    current one. Nothing is shown for what ends at once.
    """
    with ExitStack() as stack:
        yield _Counted(printable(title), written, stack)


class _Counted:
    def __init__(
        self, title: str, written: Callable[[int, int | None], str], stack: ExitStack
    ) -> None:
        self.title, self.written, self.stack = title, written, stack
        self.last_print = self.since = time.monotonic()
        self.doing, self.first = "", -1  # the current step, and the number done at `since`
        self.has_said = False
        self.on_terminal = _draws_bars()  # read before a bar replaces stderr
        self.advance: Any = None

    def __call__(self, done: int, total: int | None, doing: str = "") -> None:
        now = time.monotonic()
        if doing != self.doing or self.first < 0:
            self.doing, self.first, self.since = doing, done, now
        over, count = None, self.written(done, total)
        if total is not None and self.first < done < total:
            over = now + (now - self.since) / (done - self.first) * (total - done)
        if self.on_terminal:
            if self.advance is None and now - self.last_print >= BAR_SECONDS:
                self.advance = self.stack.enter_context(_bar(self.title))
            if self.advance is not None:
                self.advance(done, total, count, over, doing)
        elif now - self.last_print >= PLAIN_SECONDS or (self.has_said and done == total):
            self.last_print, self.has_said = now, True
            line = _joined(doing, count, until(over))
            print(f"{self.title}: {line}", file=sys.stderr, flush=True)


class _Rounds:
    """Shows the progress of a run: on a bar by `advance`, or without one in lines."""

    def __init__(
        self, title: str, total: int, done: int, advance: Callable[..., None] | None
    ) -> None:
        self.title, self.total, self.done, self.at = title, total, done, done
        self.advance, self.remaining = advance, _Remaining(total, done)
        self.evaluated: list[str] = []  # accuracies, the last known
        self.trained: list[str] = []  # of the last round: its point in a sweep, and its loss
        self.last_print = self.last_round = time.monotonic()
        self.pause = PLAIN_SECONDS
        if advance is not None:
            self._draw(None)

    def __call__(self, record: Record) -> None:
        over = self.remaining.after(record)
        if "round" in record:
            self._take(record)
        if self.advance is None:
            self._print_if_due(record, until(over))
        elif is_outside(record):  # outside of rounds: its count replaces that of rounds
            is_before = any(key in record for key in ("decoded", "planned", "twin"))
            at = self.done if is_before else self.total
            self.advance(at, self.total, _so_far(record, short=True), over, _loss(record))
        else:
            within = [] if "round" in record else [_so_far(record, short=True)]
            self._draw(over, *self.evaluated, *within, *(self.trained or [_point(record)]))

    def _take(self, record: Record) -> None:
        """Take what a round is shown by; a sweep's point without accuracies shows none."""
        called = "{} accuracy" if self.advance is None else "{}"
        self.at = _at(record)
        self.trained = [_point(record), _loss(record)]
        found = _accuracies(record)
        if found or "point" in record:
            shares = found.items()
            self.evaluated = [f"{called.format(part)} {100 * share:.1f}%" for part, share in shares]

    def _draw(self, over: float | None, *measures: str) -> None:
        assert self.advance is not None
        count = f"round {self.at}/{self.total}".ljust(len(f"round {self.total}/{self.total}"))
        self.advance(self.at, self.total, count, over, *measures)

    def _print_if_due(self, record: Record, about: str) -> None:
        now, loss = time.monotonic(), _loss(record, "train loss")
        if is_outside(record):
            number, of = _passes(record)
            # The other kinds often end at once.
            is_long = any(key in record for key in ("twin", "tuned", "baseline", "alone"))
            is_due = now - self.last_print >= PLAIN_SECONDS or (is_long and number in (1, of))
            line = _joined(_so_far(record), loss, about)
        elif "round" not in record:
            is_due = now - self.last_print >= self.pause
            self.pause = WITHIN_SECONDS if is_due else self.pause
            so_far = _joined(_point(record), _so_far(record), about)
            line = f"round {self.at + 1}/{self.total}  {so_far}"
        else:
            is_end = self.at in (self.done + 1, self.total)
            is_due = now - self.last_round >= PLAIN_SECONDS or is_end or bool(_accuracies(record))
            self.last_round = now if is_due else self.last_round
            measures = _joined(_point(record), loss, *self.evaluated, about)
            line = f"round {self.at}/{self.total}  {measures}"
        if is_due:
            self.last_print = now
            print(f"{self.title}: {line}", file=sys.stderr, flush=True)


class _Remaining:
    """Estimates when rounds, or work outside of them, are over from what was told so far."""

    def __init__(self, total: int, done: int) -> None:
        self.total, self.rounds = total, total - done  # in all, and left at the start
        self.first: tuple[float, float] | None = None  # first round: its time, and what was left
        self.over: float | None = None  # the estimated end of the rounds, by the last estimate
        self.started = time.monotonic()  # of the rounds: after work before them
        self.outside_since = self.started, 1  # start of the work outside rounds, and its pass

    def after(self, record: Record) -> float | None:
        """The estimated end of what the record is of; None if it is not known."""
        now = time.monotonic()
        if is_outside(record):
            self.started, (number, of) = now, _passes(record)
            if number <= 1:
                self.outside_since = now, number
            since, first = self.outside_since
            is_known = 1 < number < of
            return now + (now - since) / (number - first) * (of - number) if is_known else None
        if "round" in record:
            self._after_round(record, now)
        elif self.first is None and record.get("share"):
            # In the first round, by its share of images so far. A sweep gives the `rounds` left in
            # units of this point's rounds: those of points differ.
            rounds = record.get("rounds", self.rounds)
            self.over = self.started + (now - self.started) / record["share"] * rounds
        return self.over

    def _after_round(self, record: Record, now: float) -> None:
        left = record["left"] if "left" in record else self.total - _at(record)
        # The first round is not typical, since it compiles kernels, and in a sweep points run
        # theirs side by side. So it counts only for a single run, and only if it is long. It counts
        # with its own seconds: the server of a fleet may have waited an hour for its sites.
        took = record.get("seconds", now - self.started) + record.get("evaluation_seconds", 0.0)
        is_told = "point" not in record and took >= PLAIN_SECONDS
        since, before = self.first or ((now - took, left + 1) if is_told else (now, left))
        self.first = self.first or (now, left)
        if before > left > 0:
            self.over = now + (now - since) / (before - left) * left
        elif left <= 0:
            self.over = None


@contextmanager
def _bar(title: str, transient: bool = False) -> Iterator[Callable[..., None]]:
    """A bar in one line; a narrow terminal shows only the more important parts.

    The name is shortened first, since the user knows what was started. Every other part is shown
    whole or not at all: a truncated number would read as another number.
    """
    from rich.console import Console
    from rich.constrain import Constrain
    from rich.live import Live
    from rich.progress import BarColumn, Progress, ProgressColumn, TimeElapsedColumn
    from rich.table import Table
    from rich.text import Text

    console = Console(stderr=True)
    bar = BarColumn(bar_width=max(4, min(40, (console.width - 70) // 2)))
    elapsed = TimeElapsedColumn()

    class Line(ProgressColumn):
        def render(self, task: Any) -> Table:
            # The time left counts down even without an update for minutes.
            left = until(task.fields["over"])
            by_weight: list[tuple[int, RenderableType]] = [  # by importance, with places
                (2, Text(task.fields["count"])),
                (4, Text(left)),
                (3, elapsed.render(task)),
                (1, bar.render(task)),
                *((5, Text(f" {measure}")) for measure in task.fields["measures"] if measure),
            ]
            room, shown = _room(console), []
            for place, part in by_weight:
                width = console.measure(part).maximum
                if 0 < width <= room:
                    shown.append((place, part))
                    room -= width + 1  # the space beside it
            if room > 0:
                name = Text(task.description)
                name.truncate(room, overflow="ellipsis")
                shown.append((0, name))
            line = Table.grid(padding=(0, 1))
            line.add_row(*(part for _, part in sorted(shown, key=lambda placed: placed[0])))
            return line

    progress = Progress(Line(), console=console)
    task = progress.add_task(title, total=None, count="", measures=(), over=None)

    def advance(
        completed: int, of: int | None, count: str, over: float | None, *measures: str
    ) -> None:
        progress.update(
            task, completed=completed, total=of, count=count, over=over, measures=measures
        )

    def narrower() -> Constrain:
        return Constrain(progress.make_tasks_table(progress.tasks), _room(console))

    with Live(console=console, get_renderable=narrower, refresh_per_second=10, transient=transient):
        yield advance


def _room(console: Console) -> int:
    """The width of a bar in columns.

    After a full line, a terminal would echo ^C on the next line, and the bar would be drawn there
    again.
    """
    return max(1, console.width - ECHO_COLUMNS)


def is_outside(record: Record) -> bool:
    """Whether the record reports work outside of rounds: a key of `OUTSIDE`, and the total `of`."""
    return any(key in record for key in OUTSIDE)


def _passes(record: Record) -> tuple[int, int]:
    return next(record[key] for key in (*OUTSIDE, *WITHIN) if key in record), record["of"]


def _so_far(record: Record, short: bool = False) -> str:
    words = next(words for key, words in (OUTSIDE | WITHIN).items() if key in record)
    return f"{words[short]} {items(*_passes(record))}"


def _joined(*parts: str) -> str:
    return "  ".join(part for part in parts if part)


def _at(record: Record) -> int:
    """How many rounds are done, including those of a sweep's other points."""
    return int(record["done"] if "done" in record else record["round"])


def _point(record: Record) -> str:
    """The name of the point, in a sweep."""
    return printable(record["point"]) if "point" in record else ""


def _loss(record: Record, called: str = "loss") -> str:
    return f"{called} {record['train_loss']:.3f}" if "train_loss" in record else ""


def _accuracies(record: Record) -> dict[str, float]:
    parts = ("test", "validation")
    return {part: record[f"{part}_accuracy"] for part in parts if f"{part}_accuracy" in record}
