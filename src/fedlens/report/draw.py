"""Draws blocks with matplotlib in one print style, as PNG, SVG and PDF.

The SVG inside a page uses the page's colours: `var(--run-0)`, `var(--grid)`, ...
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.axis import Axis, XAxis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.patheffects import withStroke
from matplotlib.text import Annotation
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from fedlens.report.blocks import (
    FORMATS,
    Bars,
    Block,
    Contours,
    Curves,
    Drawn,
    Heat,
    Intervals,
    Line,
    Marks,
    Samples,
    Series,
    Strip,
    Tiles,
)
from fedlens.report.numbers import LONG, format_label, format_tick
from fedlens.report.palette import COLOURS, DASHES, RUNS, WIDTHS, colour_of, marker_of
from fedlens.report.tables import columns_of
from fedlens.report.texts import any_script, find_letters, short, shortened
from fedlens.runs.records import is_number
from fedlens.storage.files import write_atomically

Array = np.ndarray[Any, Any]

INK, SOFT, GRID = (COLOURS[name] for name in ("ink", "soft", "grid"))
PAPER, SHADE = "#fefefe", "#1f78b4"
WIDTH, LEFT, RIGHT, TOP, BOTTOM = 4.2, 0.6, 0.58, 0.42, 0.52  # inches
TITLE = "title"  # the id of the title's group in an SVG
LONGEST_TITLE = 46  # characters
HEIGHT, LETTERS, LINE = 2.15, 0.072, 0.18  # inches: axes' height, a letter's width, a legend line

PRINT: list[Any] = [
    Path(__file__).parent / "print.mplstyle",
    {
        "figure.facecolor": PAPER,
        **dict.fromkeys(("axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), SOFT),
        **{"grid.color": GRID, "text.color": INK},
    },
]
"""matplotlib's settings: those of the file, and colours."""

FEW = 6  # up to this many lines, their last values fit in the margin
FEW_POINTS = 12  # up to this many points of a line, each has a marker
TALL, NAMED, APART = 0.2, 0.2, 0.12  # inches: height of an interval, of a row's name, gap of rows
MOST_CELLS = 1000  # in a row of a heat map: more cannot be seen
MOST_NAMES = 40  # up to this many rows or columns are labelled with their names
LONGEST_NAME = 24  # characters
NUMBERED = 130  # up to this many cells have room for their numbers
BAR = 1.0  # inches: length of a colour bar
KINDS = (  # colours: the first is for the normal kind; all fit both white paper and a dark page
    *("#8db9dd", "#c3c9d1", "#e39b2d", "#8a94a1", "#a9805a"),
    *("#d0506b", "#8e3fa8", "#5a4fc4", "#2b8f6b", "#3a3f47"),
)
MOSAIC_NAMES = 1.1  # inches for the names of rows of images
GAP = 2  # pixels between images


def save(block: Drawn, folder: Path) -> str:
    """Write a block's picture to `folder`, one file per format; return the SVG for a page."""
    drawn = pictures(block, FORMATS)
    for kind in FORMATS:
        write_atomically(folder / f"{block.slug}.{kind}", drawn[kind])
    return for_page(drawn["svg"].decode(), block.slug)


def pictures(block: Drawn, formats: Iterable[str] = FORMATS) -> dict[str, bytes]:
    """The file contents by format: png, svg, pdf. The same block gives the same bytes."""
    with print_style(), any_script():
        return files_of(_figure(block), formats)


def files_of(figure: Figure, formats: Iterable[str]) -> dict[str, bytes]:
    """The file contents of a figure by format, within `print_style` and `any_script`."""
    no_date = {"png": {"Software": None}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}
    find_letters(figure)
    files = {}
    for kind in formats:
        file = io.BytesIO()
        clear = kind == "svg"
        figure.savefig(file, format=kind, dpi=240, metadata=no_date[kind], transparent=clear)
        files[kind] = file.getvalue()
    return files


def _curves(block: Curves) -> Axes:
    names = [one for one in block.names() if not one.off]
    block = block.thinned()
    block = replace(block, lines=[line for line in block.lines if not line.off])
    room = 52 - max((len(one.note) + 2 for one in names if one.note), default=0)
    short_names = shortened([one.name for one in names], room)
    labels = [
        f"{name}: {one.note}" if one.note else name
        for one, name in zip(names, short_names, strict=True)
    ]
    marks = [Line2D([], [], **_strokes(one.place, one.style)) for one in names]
    for kind, meaning in block.meanings():
        labels.append(meaning)
        how = {"linestyle": _dashes(kind), "linewidth": WIDTHS[kind]}
        marks.append(Line2D([], [], color=SOFT, **how))
    figure, axes = sheet(block.title, HEIGHT, BOTTOM + LINE * len(labels) + 0.1)
    place = {one.name: one.place for one in names}
    ends = []
    for line in block.lines:
        _line(axes, line, place[line.name], block.banded)
        ys = [y for y in line.y if is_number(y)]
        if ys and line.style == "solid":
            ends.append((ys[-1], format_label(ys[-1], block.percent), colour_of(place[line.name])))
    for _, height in block.levels:
        axes.axhline(height, color=SOFT, linewidth=WIDTHS["level"], linestyle=_dashes("level"))
    _scale(axes, block)
    if len(ends) <= FEW:
        name_ends(axes, ends)
    legend(figure, labels, marks)
    return axes


def _line(axes: Axes, line: Line, place: int, banded: bool) -> None:
    ys = floats(line.y)
    if banded and line.low is not None and line.high is not None:
        low, high = floats(line.low), floats(line.high)
        axes.fill_between(line.x, low, high, color=colour_of(place), alpha=0.18, linewidth=0)
    # Few points: all have markers. Many: some have, shifted so that lines' markers differ.
    few = len(ys) <= FEW_POINTS or line.style == "dots"
    every = 1 if few else (min(2 * place, len(ys) - 1), len(ys) // 6)
    axes.plot(line.x, ys, markevery=every, **_strokes(place, line.style, alone=len(ys) == 1))
    if line.ring is not None:
        how: dict[str, Any] = {"markersize": 9, "markerfacecolor": "none", "markeredgewidth": 1.5}
        axes.plot(*[[at] for at in line.ring], color=colour_of(place), marker="o", **how)


def _strokes(place: int, style: str, alone: bool = False) -> dict[str, Any]:
    """How a line looks, in a figure and in its legend. A point `alone` has a marker."""
    solid = style in ("solid", "dots")
    return {
        "color": colour_of(place),
        "linestyle": _dashes(style),
        "linewidth": WIDTHS[style],
        "alpha": 1.0 if solid else 0.75,
        "marker": marker_of(place) if solid or alone else "",
        "markersize": 4,
    }


def _dashes(style: str) -> Any:
    return (0, DASHES[style]) if DASHES[style] else "-"


def _scale(axes: Axes, block: Curves) -> None:
    axes.set_xlabel(block.x_label)
    if block.log_x and any(is_number(x) and x > 0 for line in block.lines for x in line.x):
        axes.set_xscale("log")
        plain_numbers(axes.xaxis)
    else:
        axes.set_xlim(block.span())
        axes.xaxis.set_major_locator(MaxNLocator(8, integer=block.whole, steps=[1, 2, 5, 10]))
    if block.percent:
        axes.autoscale_view()
        heights = [y for line in block.lines for y in line.y] + [y for _, y in block.levels]
        axes.set_ylim(_within_shares(axes.get_ylim(), heights))
    if block.log_y and any(is_number(y) and y > 0 for line in block.lines for y in line.y):
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(numticks=6))
        plain_numbers(axes.yaxis)
    number_ticks(axes.xaxis)
    if block.ticks:
        axes.set_xticks(range(len(block.ticks)), shortened(block.ticks, 14))
    number_ticks(axes.yaxis, block.percent)


def _within_shares(limits: tuple[float, float], values: Iterable[Any]) -> tuple[float, float]:
    """The ends of an axis of shares: at most 0% to 100%, and a little air, as in page.js.

    Bands and intervals may go beyond; `values` that do say that these are no shares.
    """
    low, high = limits
    sound = [value for value in values if is_number(value)]
    if not sound or min(sound) < 0 or max(sound) > 1:
        return limits
    air = 0.02 * (min(high, 1.0) - max(low, 0.0))
    return max(low, -air), min(high, 1 + air)


def _square(colour: str, hollow: bool = False) -> Line2D:
    """A mark of a legend."""
    how: dict[str, Any] = {"marker": "s", "linestyle": "", "markersize": 7}
    return Line2D([], [], color=colour, markerfacecolor="none" if hollow else colour, **how)


def _strip(block: Strip) -> Axes:
    _, axes = sheet(block.title, 0.52 * len(block.groups), BOTTOM, 0.16, 0.2)
    for g, (name, values) in enumerate(block.groups):
        xs = sorted(x for x in values if is_number(x))
        write(axes, 0, g + 0.06, short(name, 48), xycoords=("axes fraction", "data"), va="top")
        if not xs:
            continue
        spread = (np.arange(len(xs)) * 0.6180339887 % 1 - 0.5) * 0.36  # a deterministic jitter
        size = float(np.clip(900 / len(xs), 2, 18))
        axes.scatter(xs, g + 0.7 + spread, s=size, color=colour_of(g), alpha=0.6, linewidths=0,
                     rasterized=len(xs) > 2000)  # fmt: skip
        axes.plot([block.stroke(g)] * 2, [g + 0.48, g + 0.92], color=INK, linewidth=1.6)
    axes.set_ylim(len(block.groups) or 1, 0)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.grid(True, axis="x")
    axes.set_xlabel(block.x_label)
    number_ticks(axes.xaxis, block.percent)
    return axes


def _bars(block: Bars) -> Axes:
    squares = [_square(colour_of(place), one.hollow) for place, one in enumerate(block.series)]
    axes = _rows(block, block.groups, squares, _bar)
    axes.set_xlabel(block.y_label)
    heights = [y for one in block.series for y in one.heights if is_number(y)]
    if block.percent and 0.4 < max(heights, default=0.0) <= 1 and min(heights) >= 0:
        axes.set_xticks([0.0, 0.2, 0.4, 0.6, 0.8, 1.0])
        axes.set_xlim(0.0, max(1.0, axes.get_xlim()[1]))
    else:
        axes.set_xlim(left=None if min(heights, default=0.0) < 0 else 0.0)
    return axes


def _bar(axes: Axes, block: Bars, one: Series, row: int, place: int, at: float) -> None:
    height, error, colour = one.heights[row], one.errors and one.errors[row], colour_of(place)
    if not is_number(height):
        return
    face = "none" if one.hollow else colour
    axes.barh(at, height, height=0.86 * TALL, color=face, edgecolor=colour, linewidth=1.2)
    if is_number(error):
        axes.errorbar(height, at, xerr=error, color=INK, linewidth=1.2, capsize=2.5)


def _intervals(block: Intervals) -> Axes:
    axes = _rows(block, block.rows, [_dot(place) for place in range(len(block.series))], _interval)
    axes.set_xlabel(block.x_label)
    if block.percent:
        ends = [x for one in block.series for side in (one.low, one.high, one.values) for x in side]
        axes.set_xlim(_within_shares(axes.get_xlim(), ends))
    return axes


def _interval(axes: Axes, block: Intervals, one: Marks, row: int, place: int, at: float) -> None:
    value, low, high = (side[row] for side in (one.values, one.low, one.high))
    if block.zero:
        axes.plot([0, 0], [at - TALL / 2, at + TALL / 2], color=SOFT, linewidth=1.2)
    if not is_number(value):
        return
    colour = SOFT if row in block.faint else colour_of(place)
    if is_number(low) and is_number(high):
        how: dict[str, Any] = {"linewidth": 2.2, "alpha": 0.55, "solid_capstyle": "butt"}
        axes.plot([low, high], [at, at], color=colour, **how)
    dot = _dot(place, colour)
    dot.set_data([value], [at])
    axes.add_line(dot)


def _dot(place: int, colour: str = "") -> Line2D:
    how: dict[str, Any] = {"marker": marker_of(place), "linestyle": ""}
    return Line2D([], [], color=colour or colour_of(place), markersize=6, **how)


def _rows(
    block: Bars | Intervals,
    names: Sequence[str],
    marks: Sequence[Line2D],
    draw: Callable[..., None],
) -> Axes:
    """Rows of values, each below its name: what `draw` draws, and the numbers at the right."""
    series: Sequence[Any] = block.series
    step = NAMED + TALL * len(series) + APART
    told = [block.format(one, row) for one in series for row in range(len(names))]
    right = LETTERS * max(map(len, told), default=1) + 0.2
    below = 0.5 + (LINE * len(series) + 0.1 if len(series) > 1 else 0.0)
    figure, axes = sheet(block.title, step * max(len(names), 1), below, 0.16, right)
    axes.grid(False)  # lines would cross the names
    how: dict[str, Any] = {"xycoords": ("axes fraction", "data")}
    for r, name in enumerate(shortened(names, 54)):
        if r:
            axes.axhline(r * step - APART / 2, color=GRID, linewidth=0.6)
        write(axes, 0, r * step + NAMED / 2, name, **how)
        for s, one in enumerate(series):
            at = r * step + NAMED + TALL * (s + 0.5)
            own = isinstance(block, Intervals) and block.dots  # a colour of its own for the row
            draw(axes, block, one, r, r if own else s, at)
            write(axes, 1, at, block.format(one, r), right=8, **how)
    axes.set_ylim(step * max(len(names), 1) - APART / 2, -0.06)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.margins(x=0.06)
    most = max(2, int((WIDTH - right) / 0.6))
    axes.xaxis.set_major_locator(MaxNLocator(most, steps=[1, 2, 5, 10]))
    number_ticks(axes.xaxis, block.percent, most=min(most, 4))
    if len(series) > 1:
        legend(figure, [one.name for one in series], marks)
    return axes


def _heat(block: Heat) -> Axes:
    values = np.array([floats(row) for row in block.values], dtype=float)
    values = values.reshape(len(block.row_names), len(block.column_names))
    if values.shape[1] > MOST_CELLS:
        values = neighbours(values.T)[0].T
    num_rows, num_columns = values.shape
    rows, columns = (
        shortened(names, LONGEST_NAME) for names in (block.row_names, block.column_names)
    )
    shown_rows, shown_columns = len(rows) <= MOST_NAMES, len(columns) <= MOST_NAMES
    longest_row, longest = (
        min(max(map(columns_of, names), default=1), LONGEST_NAME)
        for names in (block.row_names, block.column_names)
    )
    left = (LETTERS * longest_row if shown_rows else 0.25) + 0.38
    width = WIDTH - left - 0.16
    upright = shown_columns and longest * LETTERS > width / max(num_columns, 1)
    named = 0.062 * longest if upright else 0.15  # inches; these letters are small
    below = named + (0.78 if block.column_label else 0.56)
    figure, axes = sheet(block.title, min(max(0.2 * num_rows, 1.2), 4.5), below, left, 0.16)
    sound = values[np.isfinite(values)]
    low = 0.0 if block.shares or not sound.size else float(sound.min())
    high = float(sound.max()) if sound.size else 1.0
    depth = _depth(block, np.clip((values - low) / ((high - low) or 1.0), 0, 1))
    ends = -0.5, len(columns) - 0.5, num_rows - 0.5, -0.5  # counts columns before thinning
    axes.imshow(_shades(depth), aspect="auto", interpolation="nearest", extent=ends)
    for axis, names, shown, turned in (
        (axes.yaxis, rows, shown_rows, 0),
        (axes.xaxis, columns, shown_columns, 90 if upright else 0),
    ):
        if shown:
            axis.set_ticks(range(len(names)), names, rotation=turned)
        else:
            axis.set_major_locator(MaxNLocator(8, integer=True))
    _frame(axes, block)
    if num_rows * num_columns <= NUMBERED and width / max(num_columns, 1) > 0.26:
        for (i, j), value in np.ndenumerate(values):
            if math.isfinite(value):
                share = f"{100 * value:.{block.digits}f}"
                text = share if block.percent else format_label(float(value))
                on = PAPER if depth[i, j] > 0.6 else INK
                axes.text(j, i, text, ha="center", va="center", fontsize=6.5, color=on)
    for i, j in block.best:
        frame: dict[str, Any] = {"fill": False, "edgecolor": colour_of(1), "linewidth": 2}
        axes.add_patch(Rectangle((j - 0.5, i - 0.5), 1, 1, clip_on=False, zorder=3, **frame))
    if sound.size:
        _colour_bar(figure, block, low, high)
    return axes


def neighbours(rows: Array) -> tuple[Array, Array]:
    """The rows, or means of neighbouring ones if there are too many to be seen, and their edges."""
    edges = np.linspace(0, len(rows), min(len(rows), MOST_CELLS) + 1).astype(np.int64)
    widths = np.diff(edges).reshape(-1, *[1] * (rows.ndim - 1))
    return np.add.reduceat(rows, edges[:-1]) / widths, edges - 0.5


def _frame(axes: Axes, block: Heat | Tiles) -> None:
    axes.set_ylabel(block.row_label)
    axes.set_xlabel(block.column_label)
    axes.grid(False)
    axes.tick_params(length=0, labelsize=8)
    axes.spines[:].set_visible(True)
    axes.spines[:].set_color(GRID)


def _depth(block: Heat, share: Array) -> Array:  # [...] in 0..1, of the way from least to most
    """The opacity of the colour: small shares are stretched; else the least stays visible."""
    depth: Array = np.sqrt(share) if block.shares else 0.06 + 0.94 * share
    return depth


def _shades(depth: Array) -> Array:  # [...] in 0..1 -> [..., 4]
    """One colour at different opacities, so that it fits both white paper and a dark page."""
    rgba = np.broadcast_to(to_rgba(SHADE), (*np.shape(depth), 4)).copy()
    rgba[..., 3] = np.nan_to_num(depth, nan=0.0)
    return rgba


def _colour_bar(figure: Figure, block: Heat, low: float, high: float) -> None:
    """Draw the colour bar at the lower right, with the least and the greatest value."""
    tall = figure.get_figheight()
    least, most = (format_label(value, block.percent) for value in (low, high))
    right, y = WIDTH - 0.16 - LETTERS * len(most) - 0.05, 0.14
    place = ((right - BAR) / WIDTH, (y - 0.05) / tall, BAR / WIDTH, 0.1 / tall)
    bar = figure.add_axes(place)
    bar.imshow(_shades(_depth(block, np.linspace(0, 1, 64)[None])), aspect="auto")
    bar.set_axis_off()
    how: dict[str, Any] = {"va": "center", "color": SOFT, "fontsize": 8}
    of = f"{block.value_label}  " if block.value_label else ""
    figure.text((right - BAR - 0.05) / WIDTH, y / tall, f"{of}{least}", ha="right", **how)
    figure.text((right + 0.05) / WIDTH, y / tall, most, ha="left", **how)


def _contours(block: Contours) -> Axes:
    figure, axes = sheet(block.title, HEIGHT, BOTTOM, left=0.72, right=0.2)
    z = np.array([floats(row) for row in block.z], dtype=float)
    sound = z[np.isfinite(z)]
    if block.log_x:
        axes.set_xscale("log")
    if block.log_y:
        axes.set_yscale("log")
    measured = np.isfinite(z)
    # Points that are all in one row or column have no contours.
    spans = min(measured.any(0).sum(), measured.any(1).sum()) >= 2
    if spans and sound.min() < sound.max():
        # Quantiles as levels: each band has as many points, and is narrow where many are alike.
        levels = np.unique(np.quantile(sound, np.linspace(0, 1, 9)))
        depth = np.linspace(0.06, 1, len(levels) - 1)
        masked = np.ma.masked_invalid(z)
        axes.contourf(block.x, block.y, masked, levels=levels, colors=_shades(depth))
        axes.contour(block.x, block.y, masked, levels=levels[1:-1], colors=SOFT, linewidths=0.6)
    xs, ys = np.meshgrid(block.x, block.y)
    axes.update_datalim(np.column_stack([xs.ravel(), ys.ravel()]))
    how: dict[str, Any] = {"zorder": 3, "clip_on": False}
    axes.scatter(xs[measured], ys[measured], s=5, linewidths=0, color=SOFT, **how)
    if len(sound) <= NUMBERED and max(z.shape) <= 10:
        ends = {min(block.x): "left", max(block.x): "right"}
        halo = [withStroke(linewidth=2, foreground=PAPER)]  # readable on any shade
        for x, y, value in zip(xs[measured], ys[measured], sound, strict=True):
            # Without the unit, which the best has: neighbours would touch.
            words = f"{100 * value:.1f}" if block.percent else format_label(float(value))
            above = -7 if y == max(block.y) else 7  # a page cuts off text above the axes
            axes.annotate(words, (x, y), (0, above), textcoords="offset points", va="center",
                          ha=ends.get(x, "center"), fontsize=7, color=INK, path_effects=halo,
                          **how)  # fmt: skip
    if block.best is not None:
        x, y, best = block.best
        star: dict[str, Any] = {"color": colour_of(1), "markeredgecolor": INK, "zorder": 4}
        axes.plot([x], [y], marker="*", markersize=13, clip_on=False, **star)
        label = f"best {format_label(best, block.percent)}"
        figure.text(1 - 0.2 / WIDTH, 0.2 / figure.get_figheight(), label, ha="right",
                    fontsize=8.5, color=INK, va="center")  # fmt: skip
    axes.set_xlabel(block.x_label)
    axes.set_ylabel(block.y_label)
    axes.grid(False)
    if block.x_names:
        axes.set_xticks(block.x, block.x_names)
    for axis, logarithmic in ((axes.xaxis, block.log_x), (axes.yaxis, block.log_y)):
        if logarithmic:
            plain_numbers(axis)
        if axis is axes.yaxis or not block.x_names:
            number_ticks(axis)
    return axes


def _tiles(block: Tiles) -> Axes:
    counts = block.counts()
    colours = {kind: KINDS[place % len(KINDS)] for place, kind in enumerate(block.kinds)}
    image = np.zeros((max(len(block.row_names), 1), max(len(block.column_names), 1), 4))
    for i, row in enumerate(block.values):
        for j, kind in enumerate(row):
            if kind is not None:
                image[i, j] = to_rgba(colours[kind])
    longest = max(map(columns_of, block.row_names), default=1)
    left = LETTERS * min(longest, 12) + 0.42
    height = min(max(0.09 * len(block.row_names), 1.2), 4.5)
    below = 0.5 + LINE * len(counts) + 0.1
    figure, axes = sheet(block.title, height, below, left=left, right=0.16)
    axes.imshow(image, aspect="auto", interpolation="nearest")
    for axis, names in ((axes.yaxis, block.row_names), (axes.xaxis, block.column_names)):
        axis.set_major_locator(MaxNLocator(8, integer=True))
        named = {float(at): short(name, 12) for at, name in enumerate(names)}
        axis.set_major_formatter(FuncFormatter(lambda at, _, named=named: named.get(at, "")))
    _frame(axes, block)
    marks = [_square(colours[kind]) for kind in counts]
    legend(figure, [f"{kind}: {count:,}" for kind, count in counts.items()], marks)
    return axes


def _samples(block: Samples) -> Axes:
    """The rows as one figure. Small images are enlarged without smoothing."""
    tall, wide = (
        max((image.shape[axis] for _, images in block.rows for image in images), default=1)
        for axis in (0, 1)
    )
    count = max((len(images) for _, images in block.rows), default=1)
    canvas = np.zeros((len(block.rows) * (tall + GAP), count * (wide + GAP), 4), np.uint8)
    for row, (_, images) in enumerate(block.rows):
        for column, image in enumerate(images):
            y, x = row * (tall + GAP), column * (wide + GAP)
            colours = image if image.ndim == 3 else image[..., None]
            canvas[y : y + image.shape[0], x : x + image.shape[1], :3] = colours
            canvas[y : y + image.shape[0], x : x + image.shape[1], 3] = 255
    height = (WIDTH - MOSAIC_NAMES - 0.1) * canvas.shape[0] / canvas.shape[1]
    _, axes = sheet(block.title, height, 0.1, left=MOSAIC_NAMES, right=0.1)
    axes.imshow(canvas, interpolation="nearest", aspect="auto")
    axes.set_xticks([])
    places = [row * (tall + GAP) + tall / 2 for row in range(len(block.rows))]
    axes.set_yticks(places, [short(name, 16) for name, _ in block.rows])
    axes.grid(False)
    axes.spines[:].set_visible(False)
    return axes


FIGURES: dict[type[Block], Callable[[Any], Axes]] = {
    Curves: _curves,
    Bars: _bars,
    Heat: _heat,
    Tiles: _tiles,
    Contours: _contours,
    Intervals: _intervals,
    Strip: _strip,
    Samples: _samples,
}


def _figure(block: Drawn) -> Figure:
    axes = next(draw(block) for kind, draw in FIGURES.items() if isinstance(block, kind))
    keep_inside(axes)
    figure = axes.figure
    assert isinstance(figure, Figure)
    return figure


def for_page(svg: str, name: str) -> str:
    """An SVG to embed in HTML: without title, with unique ids and the page's colours."""
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    svg = re.sub(rf'<g id="{TITLE}">.*?</g>', "", svg, count=1, flags=re.DOTALL)
    box = re.search(r'viewBox="0 0 (\S+) (\S+)"', svg)
    assert box is not None, "matplotlib writes the size of a figure so"
    top = 72 * TOP - 8  # points: the space of the removed title
    cut = f'viewBox="0 {top:g} {box[1]} {float(box[2]) - top:g}"'
    svg = re.sub(r"<svg [^>]*>", f"<svg {cut}>", svg, count=1)
    svg = svg.replace("xlink:href", "href")
    svg = re.sub(r' id="([^"]*)"', rf' id="{name}-\1"', svg)
    svg = re.sub(r'(href="|url\()#', rf"\1#{name}-", svg)
    inks = {COLOURS[name]: f"var(--{name})" for name in ("ink", "soft", "grid", *RUNS)}
    painted = re.compile("|".join(inks))
    return re.sub(
        r'style="[^"]*"', lambda styled: painted.sub(lambda ink: inks[ink[0]], styled[0]), svg
    )


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
    how: dict[str, Any] = {"fontsize": 10, "weight": "bold", "va": "center", "gid": TITLE}
    figure.text(0.12 / WIDTH, 1 - 0.2 / tall, short(title, LONGEST_TITLE), **how)
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


def write(
    axes: Axes, x: float, y: float, text: str, right: float = 0, above: float = 0, **how: Any
) -> None:
    """Write text so many points to the right of a position in a panel, or above it."""
    how = {"xycoords": "data", "fontsize": 8.5, "va": "center", "annotation_clip": False, **how}
    axes.annotate(text, (x, y), xytext=(right, above), textcoords="offset points", **how)


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


def floats(values: Iterable[Any]) -> list[float]:
    """The values as floats to draw; whatever is not a number becomes NaN, which is a gap."""
    return [float(y) if is_number(y) else math.nan for y in values]


def print_style() -> AbstractContextManager[None]:
    """A context in which matplotlib has the style `PRINT`."""
    context: AbstractContextManager[None] = style.context(PRINT, after_reset=True)
    return context
