"""What a page is made of: plain values that say what to show, not how it is drawn.

`fedlens.report.page.render_page` makes a page of blocks; `fedlens.report.draw` draws one for print.
A value that is None or not finite is a gap.
"""

from __future__ import annotations

import re
import statistics
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self

import numpy as np

from fedlens.report.numbers import LONG, NONE, Cell, format_label, format_number, format_place
from fedlens.runs.records import is_number

Values = Sequence[float | None]
Sheet = tuple[list[str], list[list[Cell]]]
"""A header and rows: the data behind a block, as its csv file has them."""

Image = np.ndarray[Any, np.dtype[np.uint8]]  # [H, W] gray or [H, W, 3] colour, 0 to 255

Style = Literal["solid", "dashed", "dotted"]

MOST_POINTS = 2000  # of a line that is drawn; its csv has them all


@dataclass(frozen=True, kw_only=True)
class Block(ABC):
    """One thing on a page."""

    title: str
    caption: str = ""  # what it shows
    alt: str = ""  # the same in words, for whoever cannot see it; without it, words are found
    name: str = ""  # of its files; without it, the title in small letters

    @abstractmethod
    def sheet(self) -> Sheet:
        """The data behind it."""

    @abstractmethod
    def words(self) -> str:
        """What there is to see, in a sentence or two."""

    def retitled(self, title: str) -> Self:
        """The same under another title, which names its files too."""
        return replace(self, title=title, name="")

    @property
    def slug(self) -> str:
        return re.sub(r"[^a-z0-9]+", "_", (self.name or self.title).lower()).strip("_") or "block"


@dataclass(frozen=True)
class Line:
    """A curve. Lines of one name have one colour and are switched on and off together."""

    name: str
    x: Sequence[float]
    y: Values
    low: Values | None = None  # the band around it
    high: Values | None = None
    style: Style = "solid"
    note: str = ""  # stands after the name in the legend
    ring: tuple[float, float] | None = None  # a point worth a mark: the best round
    place: int | None = None  # of its colour and marker; without it, names take them in turn
    off: bool = False  # not drawn until somebody clicks its name on the page

    def thinned(self) -> Line:
        """Every k-th of its points and the last, so that at most `MOST_POINTS` are left."""
        if len(self.x) <= MOST_POINTS:
            return self
        kept = [*range(0, len(self.x) - 1, _step(len(self.x))), len(self.x) - 1]

        def keep(values: Any) -> Any:
            return None if values is None else [values[i] for i in kept]

        bands = {"low": keep(self.low), "high": keep(self.high)}
        return replace(self, x=keep(self.x), y=keep(self.y), **bands)


def _step(num_points: int) -> int:
    return -(-num_points // (MOST_POINTS - 1))


@dataclass(frozen=True, kw_only=True)
class Curves(Block):
    """Lines over rounds, or over anything else. On a page they can be zoomed and switched off."""

    lines: Sequence[Line]
    x_label: str = "round"
    y_label: str = ""
    percent: bool = False  # y is a fraction, and is written as a percentage
    log_x: bool = False
    log_y: bool = False
    styles: Mapping[Style, str] = field(default_factory=dict)  # what broken lines mean
    levels: Sequence[tuple[str, float]] = ()  # heights to compare with, each with its name
    most_bands: int = 6  # names whose bands can be told apart: of more, none is drawn

    def thinned(self) -> Curves:
        """The same with as many points as can be seen, and the rule by which they were kept."""
        longest = max((len(line.x) for line in self.lines), default=0)
        if longest <= MOST_POINTS:
            return self
        kept = f" Of up to {longest:,} points a line, one in {_step(longest)} is drawn."
        thin = [line.thinned() for line in self.lines]
        return replace(self, lines=thin, caption=self.caption + kept, alt=self.alt or self.words())

    def sheet(self) -> Sheet:
        banded = any(line.low is not None for line in self.lines)
        header = ["line", "style", self.x_label, self.y_label or "y"]
        rows: list[list[Cell]] = []
        for line in self.lines:
            gaps = [None] * len(line.x)
            sides = (line.low or gaps, line.high or gaps) if banded else ()
            for x, y, *band in zip(line.x, line.y, *sides, strict=True):
                rows.append([line.name, self.styles.get(line.style, line.style), x, y, *band])
        return header + ["low", "high"] * banded, rows

    def words(self) -> str:
        facts = []
        for line in self.lines:
            points = [(x, y) for x, y in zip(line.x, line.y, strict=True) if is_number(y)]
            if points:
                (x0, y0), (x1, y1) = points[0], points[-1]
                style = self.styles.get(line.style)
                facts.append(
                    f"{line.name}{f', {style}' if style and len(self.styles) > 1 else ''}: "
                    f"{format_number(y0, self.percent)} at {self.x_label} {format_place(x0)}, "
                    f"{format_number(y1, self.percent)} at {self.x_label} {format_place(x1)}"
                    f"{f', {line.note}' if line.note else ''}"
                )
        facts += [f"{name}: {format_number(y, self.percent)}" for name, y in self.levels]
        return f"Line chart of {self.y_label or self.title} by {self.x_label}. {sentence(facts)}"


@dataclass(frozen=True)
class Series:
    """Bars of one colour, one in each group."""

    name: str
    heights: Values
    errors: Values | None = None  # half the length of an error bar
    hollow: bool = False  # published numbers, beside ours


@dataclass(frozen=True, kw_only=True)
class Bars(Block):
    """Bars in groups, their heights written beside them."""

    groups: Sequence[str]
    series: Sequence[Series]
    y_label: str = ""
    percent: bool = False
    digits: int = 1  # of percentages, after the point
    dots: bool = False  # group i is line i of the curves, and has its colour

    def sheet(self) -> Sheet:
        rows: list[list[Cell]] = [
            [group, one.name, one.heights[i], one.errors[i] if one.errors else None]
            for i, group in enumerate(self.groups)
            for one in self.series
        ]
        return ["group", "series", self.y_label or "height", "error"], rows

    def words(self) -> str:
        facts = []
        for i, group in enumerate(self.groups):
            for one in self.series:
                name = f"{group}, {one.name}" if len(self.series) > 1 else group
                error = one.errors[i] if one.errors else None
                around = f" ± {self.format(error)}" if is_number(error) else ""
                facts.append(f"{name}: {self.format(one.heights[i])}{around}")
        return f"Bar chart of {self.y_label or self.title}. {sentence(facts)}"

    def format(self, height: float | None) -> str:
        """A height in words."""
        return format_number(height, self.percent, self.digits)

    def label(self, height: float) -> str:
        """A height as it is written beside its bar."""
        return format_label(height, self.percent, self.digits)


@dataclass(frozen=True)
class Marks:
    """Values of one colour, one in each row, and between which two numbers each may really lie."""

    name: str
    values: Values
    low: Values
    high: Values


@dataclass(frozen=True, kw_only=True)
class Intervals(Block):
    """A dot for each value on a line from one end of its interval to the other, row by row."""

    rows: Sequence[str]
    series: Sequence[Marks]
    x_label: str = ""
    percent: bool = False
    digits: int = 1  # after the point
    zero: bool = False  # values are differences: a line stands at 0
    faint: frozenset[int] = frozenset()  # rows that are grey, since they show nothing for sure

    def sheet(self) -> Sheet:
        found: list[list[Cell]] = [
            [row, one.name, one.values[i], one.low[i], one.high[i]]
            for i, row in enumerate(self.rows)
            for one in self.series
        ]
        return ["row", "series", self.x_label or "value", "low", "high"], found

    def words(self) -> str:
        facts = []
        for i, row in enumerate(self.rows):
            for one in self.series:
                name = f"{row}, {one.name}" if len(self.series) > 1 else row
                facts.append(f"{name}: {self.format(one, i)}")
        return f"Values with intervals of {self.x_label or self.title}. {sentence(facts)}"

    def format(self, one: Marks, row: int) -> str:
        """A value as it is written beside its dot."""
        value, low, high = (self._number(side[row]) for side in (one.values, one.low, one.high))
        return value if NONE in (low, high) else f"{value} ({low} to {high})"

    def _number(self, value: float | None) -> str:
        if self.percent or not is_number(value) or abs(value) >= LONG:
            return format_label(value, self.percent, self.digits)
        return f"{value:.{self.digits}f}".replace("-", "−")


@dataclass(frozen=True, kw_only=True)
class Strip(Block):
    """A dot for each value, group by group, and a stroke at each group's median, or mark."""

    groups: Sequence[tuple[str, Values]]
    marks: Sequence[float] | None = None  # where each group has its stroke; what it is: `mark`
    mark: str = "median"
    x_label: str = ""
    percent: bool = False

    def sheet(self) -> Sheet:
        rows: list[list[Cell]] = [[name, x] for name, values in self.groups for x in values]
        return ["group", self.x_label or "value"], rows

    def words(self) -> str:
        facts = []
        for i, (name, values) in enumerate(self.groups):
            sound = sorted(x for x in values if is_number(x))
            if sound:
                low, middle, high = (
                    format_number(x, self.percent) for x in (sound[0], self.stroke(i), sound[-1])
                )
                facts.append(
                    f"{name}: {len(sound)} dots from {low} to {high}, {self.mark} {middle}"
                )
        return f"Dots of {self.x_label or self.title}. {sentence(facts)}"

    def stroke(self, place: int) -> float:
        """Where a group, which has values, has its stroke."""
        if self.marks is not None:
            return self.marks[place]
        return statistics.median(sorted(x for x in self.groups[place][1] if is_number(x)))


@dataclass(frozen=True, kw_only=True)
class Samples(Block):
    """Images in rows, each row with its name: a few of every class."""

    rows: Sequence[tuple[str, Sequence[Image]]]

    def sheet(self) -> Sheet:
        rows: list[list[Cell]] = [
            [name, number, *image.shape[:2], float(image.mean())]
            for name, images in self.rows
            for number, image in enumerate(images, 1)
        ]
        return ["row", "image", "height", "width", "mean brightness"], rows

    def words(self) -> str:
        facts = [f"{name}: {len(images)}" for name, images in self.rows]
        return f"Images in rows. {sentence(facts)}"


@dataclass(frozen=True, kw_only=True)
class Table(Block):
    """Words and numbers in rows; a number is written as it is, so give strings where it matters."""

    header: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    strong: frozenset[tuple[int, int]] = frozenset()  # (row, column) of the cells that stand out
    published: frozenset[int] = frozenset()  # columns that are a paper's numbers, not ours
    folded: bool = False  # away, until somebody asks
    dots: int = 0  # this many first rows are the first lines of the curves: their colours in front

    def sheet(self) -> Sheet:
        return list(self.header), [list(row) for row in self.rows]

    def words(self) -> str:
        return f"Table of {len(self.rows)} rows: {', '.join(self.header)}."


@dataclass(frozen=True, kw_only=True)
class Facts(Block):
    """A few numbers side by side, each under its name: what a single run came to."""

    facts: Mapping[str, str]

    def sheet(self) -> Sheet:
        return list(self.facts), [list(self.facts.values())]

    def words(self) -> str:
        return sentence([f"{name}: {value}" for name, value in self.facts.items()])


@dataclass(frozen=True, kw_only=True)
class Text(Block):
    """A heading with paragraphs, or with what is shown as it is; it may be folded away."""

    paragraphs: Sequence[str] = ()
    code: str = ""
    folded: bool = False

    def sheet(self) -> Sheet:
        return ["text"], [[line] for line in (*self.paragraphs, *self.code.splitlines())]

    def words(self) -> str:
        return " ".join(self.paragraphs)


def sentence(facts: Sequence[str]) -> str:
    return "; ".join(facts) + "." if facts else "Nothing was recorded."
