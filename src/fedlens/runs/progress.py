"""Progress display: how far something is, and how long is left."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from fedlens.data.places import Counted
from fedlens.runs.watching import ASIDE, SHORT, WITHIN, Watch, Watching
from fedlens.storage.reading import printable

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live
    from rich.progress import Progress

    from fedlens.runs.summary import Record

PLAIN_SECONDS = 2.0  # between two lines where there is no terminal, unless they are evaluations
WITHIN_SECONDS = 10.0  # between two lines within one round, without a terminal
BAR_SECONDS = 0.5  # after which a bar appears
ECHO_COLUMNS = 4  # left free to the right of a bar: room for ^C twice


@contextmanager
def rounds(title: str, total: int, done: int = 0) -> Iterator[Watching]:
    """A watch over a run: a bar on a terminal, else a line every few seconds; both on stderr."""
    title = printable(title)
    if _draws_bars():
        with _bar(title) as advance:
            remaining, at = _Remaining(total, done), done
            evaluated: list[str] = []
            trained: list[str] = []

            def tell(over: float | None, *measures: str) -> None:
                count = f"round {at}/{total}".ljust(len(f"round {total}/{total}"))
                advance(at, total, count, over, *measures)

            def show_within(record: Record) -> None:
                if is_aside(record):
                    show(record)
                    return
                remaining.within(record)
                so_far = _so_far(record, SHORT)
                tell(remaining.over, *evaluated, so_far, *(trained or [_point(record)]))

            def show(record: Record) -> None:
                nonlocal evaluated, at, trained
                if is_aside(record):  # outside of rounds: its count replaces that of rounds
                    is_before = any(key in record for key in ("decoded", "planned", "twin"))
                    over, count = remaining.aside(record), _so_far(record, SHORT)
                    advance(done if is_before else total, total, count, over, _loss(record))
                    return
                evaluated, at = _evaluated(record, evaluated, "{}"), _at(record)
                trained = [_point(record), _loss(record)]
                remaining.after(record)
                tell(remaining.over, *evaluated, *trained)

            tell(None)
            yield Watching(show, show_within)
    else:
        yield _lines(title, total, done)


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
            line = _joined(doing, count, _until(over, now))
            print(f"{self.title}: {line}", file=sys.stderr, flush=True)


class _Remaining:
    """Estimates the time left for rounds from the rounds so far."""

    def __init__(self, total: int, done: int = 0) -> None:
        self.total, self.rounds = total, total - done  # in all, and left at the start
        self.first: tuple[float, float] | None = None  # first round: its time, and what was left
        self.over: float | None = None  # the estimated end, by the last estimate
        self.start()
        self.aside_since = self.started, 1  # start of the work outside rounds, and its pass

    def start(self) -> None:
        """Start the clock of the rounds, for example after the twin is trained."""
        self.started = time.monotonic()

    def after(self, record: Record) -> str:
        now = time.monotonic()
        left = record["left"] if "left" in record else self.total - _at(record)
        # The first round is not typical, since it compiles kernels, and in a sweep points run
        # theirs side by side. So it counts only for a single run, and only if it is long. It counts
        # with its own seconds: the server of a fleet may have waited an hour for its sites.
        took = _seconds(record, now - self.started)
        is_told = "point" not in record and took >= PLAIN_SECONDS
        since, before = self.first or ((now - took, left + 1) if is_told else (now, left))
        self.first = self.first or (now, left)
        if before > left > 0:
            self.over = now + (now - since) / (before - left) * left
        elif left <= 0:
            self.over = None
        return _until(self.over, now)

    def aside(self, record: Record) -> float | None:
        """The estimated end of work outside rounds; the clock of the rounds starts after it."""
        self.start()
        now, (number, of) = self.started, _passes(record)
        if number <= 1:
            self.aside_since = now, number
        since, first = self.aside_since
        return now + (now - since) / (number - first) * (of - number) if 1 < number < of else None

    def within(self, record: Record) -> str:
        """The time left by the last estimate; in the first round, by its share of images so far.

        A sweep gives the `rounds` left in units of this point's rounds: those of points differ.
        """
        now = time.monotonic()
        if self.first is None and record.get("share"):
            rounds = record.get("rounds", self.rounds)
            self.over = self.started + (now - self.started) / record["share"] * rounds
        return _until(self.over, now)


def _until(over: float | None, now: float) -> str:
    return f"about {span(over - now)} left" if over is not None and over > now else ""


def _lines(title: str, total: int, done: int) -> Watching:
    last_print = last_round = time.monotonic()
    pause = PLAIN_SECONDS
    remaining, at = _Remaining(total, done), done
    evaluated: list[str] = []

    def show_within(record: Record) -> None:
        nonlocal last_print, pause
        now = time.monotonic()
        if is_aside(record):
            show(record)
        elif now - last_print >= pause:
            last_print, pause = now, WITHIN_SECONDS
            about = remaining.within(record)
            so_far = _joined(_point(record), _so_far(record, WITHIN), about)
            print(f"{title}: round {at + 1}/{total}  {so_far}", file=sys.stderr, flush=True)

    def show(record: Record) -> None:
        nonlocal last_print, last_round, evaluated, at
        now = time.monotonic()
        if is_aside(record):
            number, of = _passes(record)
            about = _until(remaining.aside(record), now)
            # The other kinds often end at once.
            is_long = any(key in record for key in ("twin", "tuned", "alone"))
            is_end = is_long and number in (1, of)
            if now - last_print >= PLAIN_SECONDS or is_end:
                last_print = now
                line = _joined(_so_far(record, ASIDE), _loss(record, "train loss"), about)
                print(f"{title}: {line}", file=sys.stderr, flush=True)
            return
        evaluated, at = _evaluated(record, evaluated, "{} accuracy"), _at(record)
        about = remaining.after(record)
        is_due = now - last_round >= PLAIN_SECONDS or at in (done + 1, total)
        if not is_due and not _accuracies(record):
            return
        last_print = last_round = now
        line = _joined(_point(record), _loss(record, "train loss"), *evaluated, about)
        print(f"{title}: round {at}/{total}  {line}", file=sys.stderr, flush=True)

    return Watching(show, show_within)


@contextmanager
def _bar(title: str) -> Iterator[Callable[..., None]]:
    """A bar in one line; a narrow terminal shows only the more important parts.

    The name is shortened first, since the user knows what was started. Every other part is shown
    whole or not at all: a truncated number would read as another number.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, ProgressColumn, TimeElapsedColumn
    from rich.table import Table
    from rich.text import Text

    console = Console(stderr=True)
    bar = BarColumn(bar_width=max(4, min(40, (console.width - 70) // 2)))
    elapsed = TimeElapsedColumn()

    class Line(ProgressColumn):
        def render(self, task: Any) -> Table:
            # The time left counts down even without an update for minutes.
            left = _until(task.fields["over"], time.monotonic())
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

    with _live(progress):
        yield advance


def _room(console: Console) -> int:
    """The width of a bar in columns.

    After a full line, a terminal would echo ^C on the next line, and the bar would be drawn there
    again.
    """
    return max(1, console.width - ECHO_COLUMNS)


def _live(progress: Progress, transient: bool = False) -> Live:
    """A live display of bars, a few columns narrower than the terminal."""
    from rich.constrain import Constrain
    from rich.live import Live

    def narrower() -> Constrain:
        return Constrain(progress.make_tasks_table(progress.tasks), _room(progress.console))

    return Live(
        console=progress.console,
        get_renderable=narrower,
        refresh_per_second=10,
        transient=transient,
    )


def is_aside(record: Record) -> bool:
    """Whether the record reports work outside of rounds: a key of `ASIDE`, and the total `of`."""
    return any(key in record for key in ASIDE)


def _passes(record: Record) -> tuple[int, int]:
    return next(record[key] for key in (*ASIDE, *WITHIN) if key in record), record["of"]


def _so_far(record: Record, words: dict[str, str]) -> str:
    what = next(words[key] for key in words if key in record)
    return f"{what} {items(*_passes(record))}"


def _joined(*parts: str) -> str:
    return "  ".join(part for part in parts if part)


def _at(record: Record) -> int:
    """How many rounds are done, including those of a sweep's other points."""
    return int(record["done"] if "done" in record else record["round"])


def _seconds(record: Record, otherwise: float) -> float:
    """The seconds of a round and its evaluation."""
    return float(record.get("seconds", otherwise)) + float(record.get("evaluation_seconds", 0.0))


def _point(record: Record) -> str:
    """The name of the point, in a sweep."""
    return printable(record["point"]) if "point" in record else ""


def _loss(record: Record, called: str = "loss") -> str:
    return f"{called} {record['train_loss']:.3f}" if "train_loss" in record else ""


def _evaluated(record: Record, before: list[str], called: str) -> list[str]:
    """The accuracies of this record, or `before`; none for a sweep's point without accuracies."""
    found = _accuracies(record)
    if not found:
        return [] if "point" in record else before
    return [f"{called.format(part)} {100 * accuracy:.1f}%" for part, accuracy in found.items()]


def _accuracies(record: Record) -> dict[str, float]:
    parts = ("test", "validation")
    return {part: record[f"{part}_accuracy"] for part in parts if f"{part}_accuracy" in record}


def span(seconds: float) -> str:
    """A duration in s, min or h."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
