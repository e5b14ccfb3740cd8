"""The blocks of a page: plain values that define what is shown, not how it is drawn.

`fedlens.report.page.render_page` makes a page of blocks; `fedlens.report.draw` draws one for print.
A value that is None or not finite is drawn as a gap.
"""

from __future__ import annotations

import re
import statistics
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Literal, TypeGuard, TypeVar

import numpy as np

from fedlens.report.numbers import LONG, NONE, Cell, format_label, format_number, format_place
from fedlens.runs.records import is_number

Values = Sequence[float | None]
Sheet = tuple[list[str], list[list[Cell]]]
"""A header and rows: the data of a block, as written to its csv file."""

Image = np.ndarray[Any, np.dtype[np.uint8]]  # [H, W] gray or [H, W, 3] colour, 0 to 255

Style = Literal["solid", "dashed", "dotted", "dots"]  # dots: points that no line joins

T = TypeVar("T")

FORMATS = ("png", "svg", "pdf")  # of the files of pictures
MOST_POINTS = 2000  # points of a line that are drawn at most; the csv file has all


@dataclass(frozen=True, kw_only=True)
class Block(ABC):
    """One element of a page."""

    title: str
    caption: str = ""  # what it shows
    alt: str = ""  # the text alternative for readers who cannot see it; default: `words()`
    name: str = ""  # the name of its files; default: the title in lower case

    @abstractmethod
    def sheet(self) -> Sheet:
        """The data of the block."""

    @abstractmethod
    def words(self) -> str:
        """What the block shows, in a sentence or two."""

    @property
    def slug(self) -> str:
        return re.sub(r"[^a-z0-9]+", "_", (self.name or self.title).lower()).strip("_") or "block"


@dataclass(frozen=True)
class Line:
    """A curve. Lines with the same name share a colour, and are shown and hidden together."""

    name: str
    x: Sequence[float]
    y: Values
    low: Values | None = None  # the band around it
    high: Values | None = None
    style: Style = "solid"
    note: str = ""  # written after the name in the legend
    ring: tuple[float, float] | None = None  # a point to mark: the best round
    place: int | None = None  # index of its colour and marker; default: by order of names
    off: bool = False  # hidden until a click on its name in the page

    def thinned(self) -> Line:
        """The line with every k-th of its points and the last: at most `MOST_POINTS`."""
        sides = {name: getattr(self, name) for name in ("x", "y", "low", "high")}
        step = _step(len(self.x))
        kept: dict[str, Any]
        kept = {k: [*v[:-1:step], *v[-1:]] for k, v in sides.items() if v is not None}
        return replace(self, **kept)


@dataclass(frozen=True)
class Name:
    """A name in the legend of curves."""

    name: str
    place: int  # the index of its colour and marker
    style: Style
    note: str
    off: bool  # hidden until a click on it in the page


def _step(num_points: int) -> int:
    return 1 if num_points <= MOST_POINTS else -(-num_points // (MOST_POINTS - 1))


@dataclass(frozen=True, kw_only=True)
class Curves(Block):
    """Lines over rounds or another quantity. On a page they can be zoomed and hidden."""

    lines: Sequence[Line]
    x_label: str = "round"
    y_label: str = ""
    percent: bool = False  # y is a fraction, and is written as a percentage
    log_x: bool = False
    log_y: bool = False
    styles: Mapping[Style, str] = field(default_factory=dict)  # the meaning of each line style
    levels: Sequence[tuple[str, float]] = ()  # named horizontal lines to compare with
    ticks: Sequence[str] = ()  # what x counts by name, from 0 on
    most_bands: int = 6  # with more names than this, no bands are drawn: they would overlap

    def names(self) -> list[Name]:
        """The names of the lines; each has the style of its first line, or of a solid one."""
        found = []
        for name, place in places(self.lines).items():
            mine = [line for line in self.lines if line.name == name]
            style = next((line.style for line in mine if line.style == "solid"), mine[0].style)
            note = next((line.note for line in mine if line.note), "")
            found.append(Name(name, place, style, note, any(line.off for line in mine)))
        return found

    def meanings(self) -> list[tuple[Style | Literal["level"], str]]:
        """What the legend says of styles, if there are several, and of levels."""
        levels = [f"{name}: {format_number(y, self.percent)}" for name, y in self.levels]
        styles = list(self.styles.items()) if len(self.styles) > 1 else []
        return [*styles, *(("level", words) for words in levels)]

    @property
    def banded(self) -> bool:
        """Whether all bands are drawn."""
        return len({line.name for line in self.lines}) <= self.most_bands

    @property
    def whole(self) -> bool:
        """Whether x counts something, as rounds: then no tick is between two of them."""
        return all(x == int(x) for line in self.lines for x in line.x)

    def span(self) -> tuple[float, float]:
        """The ends of an x axis that is not logarithmic: the first and last x, with a margin."""
        xs = [x for line in self.lines for x in line.x]
        first, last = min(xs, default=0), max(xs, default=1)
        room = max(0.5 if self.whole else 0, 0.02 * (last - first))
        if first == last:
            room = max(0.5, 0.02 * abs(last))
        return first - room, last + room

    def thinned(self) -> Curves:
        """The block with thinned lines; its caption then says which points were kept."""
        longest = max((len(line.x) for line in self.lines), default=0)
        if _step(longest) == 1:
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
    errors: Values | None = None  # half the length of each error bar
    hollow: bool = False  # unfilled bars: published numbers, next to ours


@dataclass(frozen=True, kw_only=True)
class Bars(Block):
    """Bars in groups, with their heights as numbers."""

    groups: Sequence[str]
    series: Sequence[Series]
    y_label: str = ""
    percent: bool = False
    digits: int = 1  # decimals of percentages

    def sheet(self) -> Sheet:
        rows: list[list[Cell]] = [
            [group, one.name, one.heights[i], one.errors[i] if one.errors else None]
            for i, group in enumerate(self.groups)
            for one in self.series
        ]
        return ["group", "series", self.y_label or "height", "error"], rows

    def words(self) -> str:
        facts = _of_each(self.groups, self.series, self.format)
        return f"Bar chart of {self.y_label or self.title}. {facts}"

    def format(self, one: Series, group: int) -> str:
        """A height and its error as they are written beside its bar."""
        error = one.errors[group] if one.errors else None
        numbers = [one.heights[group], *([error] if is_number(error) else [])]
        return " ± ".join(format_label(y, self.percent, self.digits) for y in numbers)


@dataclass(frozen=True)
class Marks:
    """Values of one colour, one in each row, with the ends of their intervals."""

    name: str
    values: Values
    low: Values
    high: Values


@dataclass(frozen=True, kw_only=True)
class Intervals(Block):
    """Rows of values: each is a dot on a line that spans its interval."""

    rows: Sequence[str]
    series: Sequence[Marks]
    x_label: str = ""
    percent: bool = False
    digits: int = 1  # decimals
    zero: bool = False  # draw a line at 0, for values that are differences
    faint: frozenset[int] = frozenset()  # rows drawn in grey, as not significant
    dots: bool = False  # row i has the colour of line i of the curves

    def sheet(self) -> Sheet:
        found: list[list[Cell]] = [
            [row, one.name, one.values[i], one.low[i], one.high[i]]
            for i, row in enumerate(self.rows)
            for one in self.series
        ]
        return ["row", "series", self.x_label or "value", "low", "high"], found

    def words(self) -> str:
        facts = _of_each(self.rows, self.series, self.format)
        return f"Values with intervals of {self.x_label or self.title}. {facts}"

    def format(self, one: Marks, row: int) -> str:
        """A value and its interval as written in their row."""
        value, low, high = (self._number(side[row]) for side in (one.values, one.low, one.high))
        return value if NONE in (low, high) else f"{value} ({low} to {high})"

    def _number(self, value: float | None) -> str:
        if self.percent or not is_number(value) or abs(value) >= LONG:
            return format_label(value, self.percent, self.digits)
        return f"{value:.{self.digits}f}".replace("-", "−")


@dataclass(frozen=True, kw_only=True)
class Strip(Block):
    """A dot for each value, group by group, and a stroke at each group's median or mark."""

    groups: Sequence[tuple[str, Values]]
    marks: Sequence[float] | None = None  # the position of each group's stroke; default: medians
    mark: str = "median"  # the name of what the stroke marks
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
        """The position of the stroke of a group, which must have values."""
        if self.marks is not None:
            return self.marks[place]
        return statistics.median(sorted(x for x in self.groups[place][1] if is_number(x)))


@dataclass(frozen=True, kw_only=True)
class Matrix(Block, Generic[T]):
    """A matrix with names for its rows and columns; a cell of None is empty."""

    values: Sequence[Sequence[T | None]]  # row by row
    row_names: Sequence[str]
    column_names: Sequence[str]
    row_label: str = ""
    column_label: str = ""

    def cells(self) -> Iterator[tuple[str, str, T]]:
        """The names of the row and the column of each cell that is not empty, and its value."""
        for row, values in zip(self.row_names, self.values, strict=True):
            for column, value in zip(self.column_names, values, strict=True):
                if value is not None:
                    yield row, column, value

    def size(self) -> str:
        row, column = (f" ({of})" if of else "" for of in (self.row_label, self.column_label))
        return f"{len(self.row_names)} rows{row} and {len(self.column_names)} columns{column}"


@dataclass(frozen=True, kw_only=True)
class Heat(Matrix[float]):
    """A heat map: shades go from least to most, or with `shares` from 0, small values stretched."""

    value_label: str = ""
    percent: bool = False
    digits: int = 0  # decimals of percentages in cells
    shares: bool = False
    best: frozenset[tuple[int, int]] = frozenset()  # (row, column) of the cells with a frame

    def sheet(self) -> Sheet:
        corner = "/".join(filter(None, (self.row_label, self.column_label)))
        rows = zip(self.row_names, self.values, strict=True)
        return [corner, *self.column_names], [[name, *row] for name, row in rows]

    def words(self) -> str:
        found = [(y, row, column) for row, column, y in self.cells() if is_number(y)]
        if not found:
            return f"Heat map of {self.size()}, without a number."
        (low, *at_low), (high, *at_high) = min(found), max(found)
        return (
            f"Heat map of {self.value_label or self.title}: {self.size()}, from "
            f"{format_number(low, self.percent)} ({', '.join(at_low)}) to "
            f"{format_number(high, self.percent)} ({', '.join(at_high)})."
        )


@dataclass(frozen=True, kw_only=True)
class Tiles(Matrix[str]):
    """A matrix whose cells are categories (kinds), one colour each."""

    kinds: Sequence[str]  # kind i has colour i

    def sheet(self) -> Sheet:
        header = [self.row_label or "row", self.column_label or "column", "kind"]
        return header, [list(cell) for cell in self.cells()]

    def words(self) -> str:
        facts = [f"{kind}: {count:,}" for kind, count in self.counts().items()]
        return f"Tiles of {self.size()}. {sentence(facts)}"

    def counts(self) -> dict[str, int]:
        """The number of cells of each kind that occurs."""
        found = Counter(kind for _, _, kind in self.cells())
        return {kind: found[kind] for kind in self.kinds if found[kind]}


@dataclass(frozen=True, kw_only=True)
class Contours(Block):
    """A quantity over a plane of two numbers, with its best point marked."""

    x: Sequence[float]
    y: Sequence[float]
    z: Sequence[Values]  # z[i][j] at y[i], x[j]
    x_label: str = "x"
    y_label: str = "y"
    z_label: str = "z"
    log_x: bool = False
    log_y: bool = False
    x_names: Sequence[str] = ()  # written instead of the numbers x, which are then positions
    percent: bool = False

    def sheet(self) -> Sheet:
        names: Sequence[Cell] = self.x_names or self.x
        return [self.x_label, self.y_label, self.z_label], [[*one] for one in self._points(names)]

    @property
    def best(self) -> tuple[float, float, float] | None:
        """x, y and z of the best point."""
        found = [(x, y, z) for x, y, z in self._points(self.x) if is_number(z)]
        return max(found, key=lambda point: point[2], default=None)

    def _points(self, names: Sequence[T]) -> Iterator[tuple[T, float, float | None]]:
        """The points with `names` in place of x."""
        for y, row in zip(self.y, self.z, strict=True):
            for x, z in zip(names, row, strict=True):
                yield x, y, z

    def words(self) -> str:
        what = f"Contours of {self.z_label} over {self.x_label} and {self.y_label}"
        if self.best is None:
            return f"{what}, without a number."
        x, y, z = self.best
        at = self.x_names[list(self.x).index(x)] if self.x_names else format_place(x)
        return (
            f"{what}. The best is {format_number(z, self.percent)}, at {self.x_label} {at} and "
            f"{self.y_label} {format_place(y)}."
        )


@dataclass(frozen=True, kw_only=True)
class Samples(Block):
    """Images in named rows, such as a few images of every class."""

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
    """A table of texts and numbers. Numbers get a default format; pass text to choose your own."""

    header: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    strong: frozenset[tuple[int, int]] = frozenset()  # (row, column) of the highlighted cells
    published: frozenset[int] = frozenset()  # columns with a paper's numbers, not ours
    folded: bool = False  # collapsed until a click
    dots: int = 0  # row i, of this many first rows, shows the colour of line i of the curves

    def sheet(self) -> Sheet:
        return list(self.header), [list(row) for row in self.rows]

    def words(self) -> str:
        return f"Table of {len(self.rows)} rows: {', '.join(self.header)}."


@dataclass(frozen=True, kw_only=True)
class Facts(Block):
    """A few named numbers side by side: the results of a single run."""

    facts: Mapping[str, str]

    def sheet(self) -> Sheet:
        return list(self.facts), [list(self.facts.values())]

    def words(self) -> str:
        return sentence([f"{name}: {value}" for name, value in self.facts.items()])


@dataclass(frozen=True, kw_only=True)
class Text(Block):
    """A heading with paragraphs, or with preformatted text (`code`); it may be folded."""

    paragraphs: Sequence[str] = ()
    code: str = ""
    folded: bool = False

    def sheet(self) -> Sheet:
        return ["text"], [[line] for line in (*self.paragraphs, *self.code.splitlines())]

    def words(self) -> str:
        return " ".join(self.paragraphs)


def sentence(facts: Sequence[str]) -> str:
    return "; ".join(facts) + "." if facts else "Nothing was recorded."


def _of_each(rows: Sequence[str], series: Sequence[Any], told: Callable[[Any, int], str]) -> str:
    """A sentence with what is told of each series in each row."""
    several = len(series) > 1
    return sentence(
        [
            f"{row}{f', {one.name}' if several else ''}: {told(one, i)}"
            for i, row in enumerate(rows)
            for one in series
        ]
    )


Drawn = Curves | Bars | Heat | Tiles | Contours | Intervals | Strip | Samples
"""The blocks that are pictures."""


def is_drawn(block: Block) -> TypeGuard[Drawn]:
    return isinstance(block, Drawn)


def places(lines: Sequence[Line]) -> dict[str, int]:
    """The index of the colour and marker of each line, by the line's name."""
    in_turn = {name: i for i, name in enumerate(dict.fromkeys(line.name for line in lines))}
    return in_turn | {line.name: line.place for line in lines if line.place is not None}
