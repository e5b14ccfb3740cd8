"""What is shown while something runs: how far it is, and how long is left."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from fedlens.data.places import Counted
from fedlens.reading import printable
from fedlens.runs.watching import Watch, Watching

if TYPE_CHECKING:
    from rich.live import Live
    from rich.progress import Progress

    from fedlens.runs.summary import Record

PLAIN_SECONDS = 2.0  # between two lines where there is no terminal
WITHIN_SECONDS = 10.0  # between two lines about one round there
BAR_SECONDS = 0.5  # that something takes before it has a bar
ECHO_COLUMNS = 4  # that a bar leaves free on the right: ^C twice
WITHIN = {"trained": "clients trained", "tested": "images tested"}  # of a round
ASIDE = {
    "decoded": "reading images",
    "planned": "counting what clients train on, client",
    "twin": "training its centralised twin, pass",
    "tuned": "fine-tuning each client's model, pass",
    "alone": "training clients by themselves, pass",
    "drawn": "resampling examples for intervals,",
}


@contextmanager
def rounds(title: str, total: int, done: int = 0) -> Iterator[Watching]:
    """A watch over a run: a bar on a terminal, else a line every few seconds; both on stderr."""
    title = printable(title)
    if _draws_bars():
        counter = "round {task.completed}/{task.total}"
        with _bar(title, total, done, counter, len(f"round {total}/{total}")) as advance:
            evaluated, remaining, at, line = "", _Remaining(total, done), done, ""

            def show_within(record: Record) -> None:
                if is_aside(record):
                    show(record)
                    return
                remaining.within(record)
                told = record if not line else {k: v for k, v in record.items() if k != "point"}
                advance(at, f"{line}  {_within(told)}".strip(), over=remaining.over)

            def show(record: Record) -> None:
                nonlocal evaluated, at, line
                if is_aside(record):
                    is_before = any(key in record for key in ("decoded", "planned", "twin"))
                    advance(done if is_before else total, _aside(record))
                    remaining.start()
                    return
                evaluated, at = _evaluated(record, evaluated), _at(record)
                line = _trained(record) + evaluated
                remaining.after(record)
                advance(at, line, over=remaining.over)

            yield Watching(show, show_within)
    else:
        yield _lines(title, total, done)


@contextmanager
def shown(wanted: bool | None, kind: Any, *about: Any) -> Iterator[Any]:
    """`kind` of progress of what was started from Python, or none of it.

    If nobody says, there is some where there is somebody to see it.
    """
    if wanted is False or (wanted is None and not sys.stderr.isatty() and not _in_notebook()):
        yield None
    else:
        with kind(*about) as watch:
            yield watch


def _draws_bars() -> bool:
    """Whether there is a terminal that can write over its own lines, unlike Emacs's shell."""
    is_dumb = os.environ.get("TERM", "").lower() in ("dumb", "unknown")
    return sys.stderr.isatty() and not is_dumb


def _in_notebook() -> bool:
    """Whether a kernel of Jupyter runs this, which some only import."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")


def decoding(watch: Watch | None) -> Counted | None:
    """Tells a watch over a run, before its first round, how many images are decoded."""
    if watch is None:
        return None
    return lambda done, total: watch({"decoded": done, "of": total})


@contextmanager
def working(title: str) -> Iterator[None]:
    """A sign that something goes on which cannot be counted, and since when."""
    title = printable(title)
    if not _draws_bars():
        print(f"{title} ...", file=sys.stderr, flush=True)
        yield
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn()
    progress = Progress(*columns, console=Console(stderr=True))
    progress.add_task(title, total=None)
    with _live(progress, transient=True):
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
    """A watch over what is done one by one: a bar on a terminal, else a line every few seconds.

    It is called with how many are done, of how many and, where one thing is done after another,
    with what is being done. What is over at once is not shown at all.
    """
    with ExitStack() as stack:
        yield _Counted(printable(title), written, stack)


class _Counted:
    def __init__(
        self, title: str, written: Callable[[int, int | None], str], stack: ExitStack
    ) -> None:
        self.title, self.written, self.stack = title, written, stack
        self.last_print = self.since = time.monotonic()
        self.doing, self.first = "", -1  # what was told last, and how many were done at `since`
        self.has_said = False
        self.on_terminal = _draws_bars()  # asked before a bar puts itself in its place
        self.advance: Any = None

    def __call__(self, done: int, total: int | None, doing: str = "") -> None:
        now = time.monotonic()
        if doing != self.doing or self.first < 0:
            self.doing, self.first, self.since = doing, done, now
        about = ""
        if total is not None and self.first < done < total:
            about = _about((now - self.since) / (done - self.first) * (total - done))
        line = f"{doing}  " if doing else ""
        line += f"{self.written(done, total)}{about}"
        if self.on_terminal:
            if self.advance is None and now - self.last_print >= BAR_SECONDS:
                self.advance = self.stack.enter_context(_bar(self.title, None, 0, ""))
            if self.advance is not None:
                self.advance(done, line, total)
        elif now - self.last_print >= PLAIN_SECONDS or (self.has_said and done == total):
            self.last_print, self.has_said = now, True
            print(f"{self.title}: {line}", file=sys.stderr, flush=True)


class _Remaining:
    """How long rounds will still take, by what the others took."""

    def __init__(self, total: int, done: int = 0) -> None:
        self.total, self.rounds = total, total - done  # in all, and of those that are left
        self.first: tuple[float, float] | None = None  # when the first came, and what was left then
        self.over: float | None = None  # when all will be, by what was said last
        self.start()

    def start(self) -> None:
        """The rounds begin now: their twin, say, is done."""
        self.started = time.monotonic()

    def after(self, record: Record) -> str:
        now = time.monotonic()
        left = record["left"] if "left" in record else self.total - _at(record)
        # A first round says little of the others, since kernels are compiled in it, and nothing
        # where the points of a sweep take it side by side: only where it is long, it is asked.
        # By what it took itself: the server of a fleet may have waited an hour for its sites.
        took = _seconds(record, now - self.started)
        is_told = "point" not in record and took >= PLAIN_SECONDS
        since, before = self.first or ((now - took, left + 1) if is_told else (now, left))
        self.first = self.first or (now, left)
        if before > left > 0:
            self.over = now + (now - since) / (before - left) * left
        elif left <= 0:
            self.over = None
        return self._until_over(now)

    def within(self, record: Record) -> str:
        """What of the last estimate is left; in a first round, by the images trained on so far.

        A sweep says how many `rounds` as long as that one are left: those of points differ.
        """
        now = time.monotonic()
        if self.first is None and record.get("share"):
            rounds = record.get("rounds", self.rounds)
            self.over = self.started + (now - self.started) / record["share"] * rounds
        return self._until_over(now)

    def _until_over(self, now: float) -> str:
        return _about(self.over - now) if self.over is not None and self.over > now else ""


def _about(seconds: float) -> str:
    return f"  about {span(seconds)} left"


def _lines(title: str, total: int, done: int) -> Watching:
    last_print = aside_since = time.monotonic()
    evaluated, remaining, at = "", _Remaining(total, done), done

    def show_within(record: Record) -> None:
        nonlocal last_print
        now = time.monotonic()
        if is_aside(record):
            show(record)
        elif now - last_print >= WITHIN_SECONDS:
            last_print = now
            about = remaining.within(record)
            line = f"{title}: round {at + 1}/{total}  {_within(record)}{about}"
            print(line, file=sys.stderr, flush=True)

    def show(record: Record) -> None:
        nonlocal last_print, aside_since, evaluated, at
        now = time.monotonic()
        if is_aside(record):
            number, of = _passes(record)
            aside_since = now if number <= 1 else aside_since
            # Others are often over at once.
            is_long = any(key in record for key in ("twin", "tuned", "alone"))
            is_end = is_long and number in (1, of)
            if now - last_print >= PLAIN_SECONDS or is_end:
                last_print = now
                left = (now - aside_since) / max(number - 1, 1) * (of - number)
                about = _about(left) if 1 < number < of else ""
                print(f"{title}: {_aside(record)}{about}", file=sys.stderr, flush=True)
            remaining.start()
            return
        evaluated, at, about = _evaluated(record, evaluated), _at(record), remaining.after(record)
        if now - last_print < PLAIN_SECONDS and at not in (done + 1, total):
            return
        last_print = now
        line = f"{title}: round {at}/{total}  {_trained(record)}{evaluated}{about}"
        print(line, file=sys.stderr, flush=True)

    return Watching(show, show_within)


@contextmanager
def _bar(
    title: str, total: int | None, done: int, counter: str, counter_width: int = 0
) -> Iterator[Any]:
    """A bar. Where a terminal is narrow, measures give way: the count and the time stay."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeElapsedColumn
    from rich.table import Column
    from rich.text import Text

    class Left(ProgressColumn):
        """Counts down by itself, also where nothing is told for minutes."""

        def render(self, task: Any) -> Text:
            left = (task.fields["over"] or 0.0) - time.monotonic()
            return Text(_about(left).strip() if left > 0 else "")

    class Measures(ProgressColumn):
        def render(self, task: Any) -> Text:
            return Text(task.fields["measures"], no_wrap=True, overflow="ellipsis")

    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=max(4, min(40, (console.width - 70) // 2))),
        TextColumn(counter, table_column=Column(no_wrap=True, min_width=counter_width)),
        TimeElapsedColumn(table_column=Column(no_wrap=True, min_width=7)),
        Left(table_column=Column(no_wrap=True, min_width=16 if counter_width else None)),
        Measures(table_column=Column()),  # it may shrink, which others may not
    )
    progress = Progress(*columns, console=console)
    task = progress.add_task(title, total=total, completed=done, measures="", over=None)

    def advance(
        completed: int, measures: str, of: int | None = total, over: float | None = None
    ) -> None:
        progress.update(task, completed=completed, measures=measures, total=of, over=over)

    with _live(progress):
        yield advance


def _live(progress: Progress, transient: bool = False) -> Live:
    """What shows bars, in a few columns less than there are."""
    from rich.constrain import Constrain
    from rich.live import Live

    # The ^C that a terminal writes behind a full line is on the next one, and the bar would be
    # drawn there again.
    def narrower() -> Constrain:
        width = max(1, progress.console.width - ECHO_COLUMNS)
        return Constrain(progress.make_tasks_table(progress.tasks), width)

    return Live(
        console=progress.console,
        get_renderable=narrower,
        refresh_per_second=10,
        transient=transient,
    )


def is_aside(record: Record) -> bool:
    """Whether it tells of what is done besides the rounds: a key of `ASIDE`, and `of` how many."""
    return any(key in record for key in ASIDE)


def _passes(record: Record) -> tuple[int, int]:
    return next(record[key] for key in (*ASIDE, *WITHIN) if key in record), record["of"]


def _within(record: Record) -> str:
    what = next(WITHIN[key] for key in WITHIN if key in record)
    return f"{_point(record)}{what} {items(*_passes(record))}"


def _aside(record: Record) -> str:
    number, of = _passes(record)
    what = next(ASIDE[key] for key in ASIDE if key in record)
    loss = f"  {_trained(record)}" if "twin" in record else ""
    return f"{what} {items(number, of)}{loss}"


def _at(record: Record) -> int:
    """How many rounds are done, those of a sweep's other points included."""
    return int(record["done"] if "done" in record else record["round"])


def _seconds(record: Record, otherwise: float) -> float:
    """What a round took, with its evaluation."""
    return float(record.get("seconds", otherwise)) + float(record.get("evaluation_seconds", 0.0))


def _point(record: Record) -> str:
    """Of a sweep's, which one it is."""
    return f"{printable(record['point'])}  " if "point" in record else ""


def _trained(record: Record) -> str:
    return f"{_point(record)}train loss {record['train_loss']:.3f}"


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
