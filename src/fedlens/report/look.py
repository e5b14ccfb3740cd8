"""The common style of all figures: sizes, colours, fonts; and texts that fit into them."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cache
from typing import Any

import numpy as np
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.axis import Axis, XAxis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import findfont, fontManager, get_font
from matplotlib.lines import Line2D
from matplotlib.text import Annotation, Text
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from fedlens.report.numbers import LONG, format_tick
from fedlens.runs.records import is_number

Array = np.ndarray[Any, Any]

INK, SOFT, GRID, PAPER, SHADE = "#1b1f24", "#5b6470", "#dfe3e8", "#fefefe", "#1f78b4"
COLOURS = (  # the first four differ under every common colour blindness; markers help with more
    "#0069b4",
    "#cf6f00",
    "#7b1846",
    "#1a9c82",
    "#cf4fa5",
    "#14245f",
    "#6d5a12",
    "#7c8590",
    "#8f1fe8",
)
MARKERS = "osD^vPX"  # 7 markers and 9 colours: line 10 has the first colour with another marker
DASHES: dict[str, Any] = {"solid": "-", "dotted": (0, (1.2, 1.6)), "dashed": (0, (4.5, 2.2))}
DASHES |= {"level": DASHES["dotted"], "dots": ""}

WIDTH, LEFT, RIGHT, TOP, BOTTOM = 4.2, 0.6, 0.58, 0.42, 0.52  # inches
NO_LETTERS = "Last Resort"  # matplotlib's fallback font, which draws a box for every character
TITLE = "title"  # the id of the title's group in an SVG
LONGEST_TITLE = 46  # characters
HEIGHT, LETTERS, LINE = 2.15, 0.072, 0.18  # inches: axes' height, a letter's width, a legend line

LOOK = {
    "figure.facecolor": PAPER,
    "axes.facecolor": "none",
    "axes.edgecolor": SOFT,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlepad": 9,
    "axes.labelsize": 9,
    "axes.labelcolor": SOFT,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "text.color": INK,
    "text.parse_math": False,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
    "ytick.major.size": 0,
    "ytick.minor.size": 0,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "legend.handlelength": 2.4,
    "lines.solid_capstyle": "round",
    "svg.fonttype": "none",
    "svg.hashsalt": "fedlens",
}


def sheet(
    title: str, height: float, below: float, left: float = LEFT, right: float = RIGHT
) -> tuple[Figure, Axes]:
    """A figure with a title and one panel of this height, in inches.

    `draw.for_page` removes the title, since a page has it as text.
    """
    tall = TOP + height + below
    figure = Figure(figsize=(WIDTH, tall))
    FigureCanvasAgg(figure)
    axes = figure.add_axes(
        (left / WIDTH, below / tall, (WIDTH - left - right) / WIDTH, height / tall)
    )
    look: dict[str, Any] = {"fontsize": 10, "weight": "bold", "va": "center", "gid": TITLE}
    figure.text(0.12 / WIDTH, 1 - 0.2 / tall, short(title, LONGEST_TITLE), **look)
    return figure, axes


def name_ends(axes: Axes, lasts: Sequence[tuple[float, str, str]]) -> None:
    """Write the last values in the right margin, moved apart where they would overlap."""
    axes.autoscale_view()
    low, high = axes.get_window_extent().intervaly
    gap = axes.figure.dpi / 72 * 10.5
    if len(lasts) * gap > high - low + gap:
        return
    ends = sorted((float(axes.transData.transform((0, y))[1]), text, c) for y, text, c in lasts)
    heights: list[float] = []
    for height, _, _ in ends:
        heights.append(max(height, heights[-1] + gap if heights else low))
    ceiling = high
    for i in reversed(range(len(heights))):
        heights[i] = min(heights[i], ceiling)
        ceiling = heights[i] - gap
    for place, (_, text, colour) in zip(heights, ends, strict=True):
        y = (place - low) / (high - low)
        write(axes, 1, y, text, right=5, xycoords="axes fraction", color=colour, weight="bold")


def legend(figure: Figure, labels: Sequence[str], marks: Sequence[Line2D]) -> None:
    """Draw the legend below a figure: names, each with its line or marker."""
    # The names are set afterwards: matplotlib's legend leaves out labels that start with "_".
    drawn = figure.legend(marks, ["."] * len(labels), loc="lower left", borderaxespad=0.3)
    for text, label in zip(drawn.get_texts(), labels, strict=True):
        text.set_text(short(label, 52))


def write(axes: Axes, x: float, y: float, text: str, right: float = 0, **look: Any) -> None:
    """Write text `right` points to the right of a position in a panel."""
    look = {"xycoords": "data", "fontsize": 8.5, "va": "center", "annotation_clip": False, **look}
    axes.annotate(text, (x, y), xytext=(right, 0), textcoords="offset points", **look)


def plain_numbers(axis: Axis) -> None:
    """Write the powers of a logarithmic axis as other axes are written."""
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def number_ticks(axis: Axis, percent: bool = False, most: int = 4) -> bool:
    """Write percentages beside an axis, or large numbers as pages do; return whether these.

    matplotlib would write 1.05, and 1e6 at the end of the axis. An x axis with large numbers gets
    at most `most` steps so that its labels do not overlap.
    """
    if percent:
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.4g}%"))
    if percent or max(map(abs, axis.get_view_interval())) < LONG:
        return False
    match axis.get_major_locator() if isinstance(axis, XAxis) else None:
        case LogLocator() as ticks:
            ticks.set_params(numticks=most + 2)
        case MaxNLocator() as ticks:
            ticks.set_params(nbins=most, steps=[1, 2, 5, 10])
    axis.set_major_formatter(FuncFormatter(lambda value, _: format_tick(value)))
    return True


def keep_inside(axes: Axes) -> None:
    """Make a panel narrower if labels next to it would be cut off at the figure's edges."""
    panel, edge, point = axes.get_window_extent(), axes.figure.bbox.width, axes.figure.dpi / 72
    air, left, right = 3 * point, panel.x0, panel.x1
    sides = [axis.get_tightbbox(for_layout_only=True) for axis in (axes.xaxis, axes.yaxis)]
    for box in filter(None, sides):
        if box.x0 < 0:
            left = max(left, panel.x0 - box.x0 + air)
        if box.x1 > edge:
            right = min(right, panel.x1 - (box.x1 - edge) - air)
    for text in axes.texts:
        if isinstance(text, Annotation) and (before := text.xyann[0] * point) > 0:
            # Its start is a share of the panel's width; its length stays when the panel shrinks.
            box = text.get_window_extent()
            share, length = (box.x0 - before - panel.x0) / panel.width, before + box.width
            if share > 0 and left + share * (right - left) + length > edge + 0.5:
                right = left + (edge - air - length - left) / share
    right = max(right, left + panel.width / 4)  # the panel keeps a quarter of its width
    if (left, right) != (panel.x0, panel.x1):
        place = axes.get_position()
        axes.set_position((left / edge, place.y0, (right - left) / edge, place.height))


def colour_of(i: int) -> str:
    return COLOURS[i % len(COLOURS)]


def short(name: str, room: int) -> str:
    half = (room - 1) // 2
    return name if len(name) <= room else f"{name[:half]}…{name[-half:]}"


def shortened(names: Sequence[str], room: int) -> list[str]:
    """The names cut to `room` characters; different names stay different.

    First the settings that all names begin with are cut, then the middle of a name. If no settings
    are shared and two cut names are equal, the shared beginning is cut; names that are still equal
    get numbers.
    """
    cut = [short(name, room) for name in names]
    if cut != list(names) and len(set(names)) > 1:
        unlike = (i for i, letters in enumerate(zip(*names, strict=False)) if len(set(letters)) > 1)
        shared = next(unlike, min(map(len, names)))
        settings = names[0].rfind(", ", 0, shared) + 2  # end of the settings that all begin with
        if settings > 1 or len(set(cut)) < len(set(names)):
            begin = settings if settings > 1 else shared
            cut = [short(f"…{name[begin:]}" if begin > 1 else name, room) for name in names]
    places: dict[str, list[str]] = {}
    for name, one in zip(names, cut, strict=True):
        if name not in (found := places.setdefault(one, [])):
            found.append(name)
    return [
        one if len(places[one]) == 1 else f"{short(one, room - 3)} {places[one].index(name) + 1}"
        for name, one in zip(names, cut, strict=True)
    ]


def floats(values: Iterable[Any]) -> list[float]:
    """The values as floats to draw; whatever is not a number becomes NaN, which is a gap."""
    return [float(y) if is_number(y) else math.nan for y in values]


def find_letters(figure: Figure) -> None:
    """Add fallback fonts to texts whose own font lacks some of their characters.

    A character that no font has is drawn as a box. Fonts are searched only if one is missing.
    """
    for text in figure.findobj(Text):
        assert isinstance(text, Text)
        words = text.get_text()
        if words.isascii():
            continue
        letters = frozenset(words) - frozenset("\n")
        missing = letters - _had(findfont(text.get_fontproperties()), letters)
        if missing and (others := _families(missing)):
            text.set_fontfamily([*text.get_fontfamily(), *others])


@cache
def _families(letters: frozenset[str]) -> list[str]:
    """Font families that together cover these letters as far as possible, the best first."""
    files = {
        font.name: font.fname
        for font in sorted(fontManager.ttflist, key=lambda font: (font.name, font.fname))
        if not font.name.startswith(NO_LETTERS)
    }
    left, found = letters, list[str]()
    while left:
        have = {name: _had(file, left) for name, file in files.items()}
        best = max(have, key=lambda name: len(have[name]), default="")
        if not best or not have[best]:
            break
        found.append(best)
        left -= have[best]
    return found


@cache
def _had(file: str, letters: frozenset[str]) -> frozenset[str]:
    """The subset of the letters that the font has."""
    with suppress(OSError, RuntimeError):  # deleted since matplotlib listed it, or damaged
        font = get_font(file)
        return frozenset(letter for letter in letters if font.get_char_index(ord(letter)))
    return frozenset()


@contextmanager
def any_script() -> Iterator[None]:
    """Silence matplotlib's warnings about characters that no font has: they become boxes."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")
        said = logging.getLogger("matplotlib.font_manager")
        level = said.level
        said.setLevel(logging.ERROR)  # else it logs every font that has no bold style
        try:
            yield
        finally:
            said.setLevel(level)


def print_look() -> AbstractContextManager[None]:
    """A context in which matplotlib has the style `LOOK`."""
    context: AbstractContextManager[None] = style.context(LOOK, after_reset=True)
    return context
