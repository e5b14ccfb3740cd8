"""Draws blocks with matplotlib in one print style, as PNG, SVG and PDF.

The SVG inside a page uses the page's colours: `var(--run-0)`, `var(--grid)`, ...
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator

from fedlens.report import look
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
from fedlens.report.numbers import format_label, format_number
from fedlens.report.tables import columns_of
from fedlens.runs.records import is_number
from fedlens.storage.files import write_atomically

FEW = 6  # up to this many lines, their last values fit in the margin
FEW_POINTS = 12  # up to this many points of a line, each has a marker
BESIDE = 22  # names up to this many characters fit beside their bars
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


def save(block: Drawn, folder: Path, formats: Sequence[str] = FORMATS) -> str:
    """Write a block's picture to `folder`, one file per format; return the SVG for a page."""
    drawn = pictures(block, {"svg", *formats})
    for kind in formats:
        write_atomically(folder / f"{block.slug}.{kind}", drawn[kind])
    return for_page(drawn["svg"].decode(), block.slug)


def pictures(block: Drawn, formats: Sequence[str] | set[str] = FORMATS) -> dict[str, bytes]:
    """The file contents by format: png, svg, pdf. The same block gives the same bytes."""
    no_date = {"png": {"Software": None}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}
    with look.print_look(), look.any_script():
        figure = _figure(block)
        look.find_letters(figure)
        files = {}
        for kind in formats:
            file = io.BytesIO()
            clear = kind == "svg"
            figure.savefig(file, format=kind, dpi=240, metadata=no_date[kind], transparent=clear)
            files[kind] = file.getvalue()
    return files


def _curves(block: Curves) -> Figure:
    names = [one for one in block.names() if not one.off]
    block = block.thinned()
    block = replace(block, lines=[line for line in block.lines if not line.off])
    room = 52 - max((len(one.note) + 2 for one in names if one.note), default=0)
    short_names = look.shortened([one.name for one in names], room)
    labels = [
        f"{name}: {one.note}" if one.note else name
        for one, name in zip(names, short_names, strict=True)
    ]
    marks = [Line2D([], [], **_strokes(one.place, one.style)) for one in names]
    for style, meaning in block.meanings():
        labels.append(meaning)
        thin: dict[str, Any] = {"linewidth": 1.1} if style == "level" else {}
        marks.append(Line2D([], [], color=look.SOFT, linestyle=look.DASHES[style], **thin))
    figure, axes = look.sheet(block.title, look.HEIGHT, look.BOTTOM + look.LINE * len(labels) + 0.1)
    place = {one.name: one.place for one in names}
    ends = []
    for line in block.lines:
        _line(axes, line, place[line.name], block.banded)
        ys = [y for y in line.y if is_number(y)]
        if ys and line.style == "solid":
            ends.append(
                (ys[-1], format_label(ys[-1], block.percent), look.colour_of(place[line.name]))
            )
    for _, height in block.levels:
        axes.axhline(height, color=look.SOFT, linewidth=1.1, linestyle=look.DASHES["level"])
    _scale(axes, block)
    if len(ends) <= FEW:
        look.name_ends(axes, ends)
    look.keep_inside(axes)
    look.legend(figure, labels, marks)
    return figure


def _line(axes: Axes, line: Line, place: int, banded: bool) -> None:
    ys = look.floats(line.y)
    if banded and line.low is not None and line.high is not None:
        low, high = look.floats(line.low), look.floats(line.high)
        axes.fill_between(line.x, low, high, color=look.colour_of(place), alpha=0.18, linewidth=0)
    # Few points: all have markers. Many: some have, shifted so that lines' markers differ.
    few = len(ys) <= FEW_POINTS or line.style == "dots"
    every = 1 if few else (min(2 * place, len(ys) - 1), len(ys) // 6)
    axes.plot(line.x, ys, markevery=every, **_strokes(place, line.style, alone=len(ys) == 1))
    if line.ring is not None:
        how: dict[str, Any] = {"markersize": 9, "markerfacecolor": "none", "markeredgewidth": 1.5}
        axes.plot(*[[at] for at in line.ring], color=look.colour_of(place), marker="o", **how)


def _strokes(place: int, style: str, alone: bool = False) -> dict[str, Any]:
    """How a line looks, in a figure and in its legend. A point `alone` has a marker."""
    solid = style in ("solid", "dots")
    return {
        "color": look.colour_of(place),
        "linestyle": look.DASHES[style],
        "linewidth": 1.9 if solid else 1.1,
        "alpha": 1.0 if solid else 0.75,
        "marker": look.MARKERS[place % len(look.MARKERS)] if solid or alone else "",
        "markersize": 4,
    }


def _scale(axes: Axes, block: Curves) -> None:
    axes.set_xlabel(block.x_label)
    if block.log_x and any(is_number(x) and x > 0 for line in block.lines for x in line.x):
        axes.set_xscale("log")
        look.plain_numbers(axes.xaxis)
    else:
        axes.set_xlim(block.span())
        axes.xaxis.set_major_locator(MaxNLocator(8, integer=block.whole, steps=[1, 2, 5, 10]))
    if block.percent:
        _keep_to_shares(axes, block)
    if block.log_y and any(is_number(y) and y > 0 for line in block.lines for y in line.y):
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(numticks=6))
        look.plain_numbers(axes.yaxis)
    look.number_ticks(axes.xaxis)
    look.number_ticks(axes.yaxis, block.percent)


def _keep_to_shares(axes: Axes, block: Curves) -> None:
    """Limit an axis of shares to 0% to 100%, even if a band goes beyond; page.js does the same."""
    ys = [y for line in block.lines for y in line.y if is_number(y)]
    ys += [height for _, height in block.levels]
    if ys and min(ys) >= 0 and max(ys) <= 1:
        axes.autoscale_view()
        low, high = axes.get_ylim()
        air = 0.02 * (min(high, 1.0) - max(low, 0.0))
        axes.set_ylim(max(low, -air), min(high, 1 + air))


def _bars(block: Bars) -> Figure:
    longest = max(map(columns_of, block.groups), default=0)
    beside = len(block.series) == 1 and longest <= BESIDE  # names are beside the bars, else above
    tall, pad, named = (0.2, 0.04, 0.0) if beside else (0.24, 0.16, 0.2)  # inches
    step = named + tall * len(block.series) + pad
    key = 0 if len(block.series) == 1 else look.LINE * len(block.series) + 0.1
    left = look.LETTERS * longest + 0.2 if beside else 0.12
    figure, axes = look.sheet(block.title, step * len(block.groups), 0.32 + key, left)
    ends = [0.0]
    for g, group in enumerate(look.shortened(block.groups, 48)):
        if beside:
            where: Any = ("axes fraction", "data")
            look.write(axes, 0, g * step + tall / 2, group, -5, xycoords=where, ha="right")
        else:
            look.write(axes, 0, g * step + named / 2, group)
        for s, series in enumerate(block.series):
            at = g * step + named + tall * (s + 0.5)
            ends += _bar(
                axes, block, series, g, at, 0.86 * tall, look.colour_of(g if block.dots else s)
            )
    axes.set_ylim(step * len(block.groups), -0.04)
    heights = [y for series in block.series for y in series.heights if is_number(y)]
    room = 1.45 if any(series.errors for series in block.series) else 1.0  # for "19.3% ± 10.0%"
    large = look.number_ticks(axes.xaxis, block.percent)
    most = max(2, int((look.WIDTH - left - look.RIGHT) / room / 0.8)) if large else 6
    steps = MaxNLocator(most, steps=[1, 2, 5, 10])
    ticks = steps.tick_values(min(ends), max(ends) or 1)
    if block.percent and min(ends) == 0 and 0.4 < max(heights, default=0.0) <= 1:
        ticks = [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]  # the axis goes up to 100%
    axes.set_xticks(ticks)  # no tick where the axis only makes room for text: no 120%
    axes.spines["bottom"].set_bounds(ticks[0], ticks[-1])
    axes.set_xlim(ticks[0], max(ticks[-1], max(ends) * room))
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.grid(False)
    look.keep_inside(axes)
    if len(block.series) > 1:
        marks = [_square(look.colour_of(i), one.hollow) for i, one in enumerate(block.series)]
        look.legend(figure, [series.name for series in block.series], marks)
    return figure


def _bar(
    axes: Axes, block: Bars, series: Series, place: int, at: float, tall: float, colour: str
) -> tuple[float, float]:
    """Draw one bar with its number; return its left and right end, error bar included."""
    height, error = series.heights[place], series.errors[place] if series.errors else None
    if not is_number(height):
        look.write(axes, 0, at, format_number(None), right=5)
        return 0.0, 0.0
    face = "none" if series.hollow else colour
    axes.barh(at, height, height=tall, color=face, edgecolor=colour, linewidth=1.2)
    end, words = max(height, 0.0), block.label(height)
    if is_number(error):
        axes.errorbar(height, at, xerr=error, color=look.INK, linewidth=1.2, capsize=2.5)
        end, words = max(height + error, 0.0), f"{words} ± {block.label(error)}"
    look.write(axes, end, at, words, right=5, weight="bold")
    return min(height - (error or 0.0), 0.0), end


def _square(colour: str, hollow: bool = False) -> Line2D:
    """A mark of a legend."""
    how: dict[str, Any] = {"marker": "s", "linestyle": "", "markersize": 7}
    return Line2D([], [], color=colour, markerfacecolor="none" if hollow else colour, **how)


def _strip(block: Strip) -> Figure:
    figure, axes = look.sheet(
        block.title, 0.52 * len(block.groups), look.BOTTOM, left=0.16, right=0.2
    )
    for g, (name, values) in enumerate(block.groups):
        xs = sorted(x for x in values if is_number(x))
        look.write(
            axes, 0, g + 0.06, look.short(name, 48), xycoords=("axes fraction", "data"), va="top"
        )
        if not xs:
            continue
        spread = (np.arange(len(xs)) * 0.6180339887 % 1 - 0.5) * 0.36  # a deterministic jitter
        size = float(np.clip(900 / len(xs), 2, 18))
        axes.scatter(xs, g + 0.7 + spread, s=size, color=look.colour_of(g), alpha=0.6, linewidths=0,
                     rasterized=len(xs) > 2000)  # fmt: skip
        axes.plot([block.stroke(g)] * 2, [g + 0.48, g + 0.92], color=look.INK, linewidth=1.6)
    axes.set_ylim(len(block.groups) or 1, 0)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.grid(True, axis="x")
    axes.set_xlabel(block.x_label)
    look.number_ticks(axes.xaxis, block.percent)
    look.keep_inside(axes)
    return figure


def _intervals(block: Intervals) -> Figure:
    step = NAMED + TALL * len(block.series) + APART
    key = look.LINE * len(block.series) + 0.1 if len(block.series) > 1 else 0.0
    told = [block.format(one, i) for one in block.series for i in range(len(block.rows))]
    right = look.LETTERS * max(map(len, told), default=1) + 0.2
    figure, axes = look.sheet(block.title, step * max(len(block.rows), 1), 0.5 + key, 0.16, right)
    axes.grid(False)  # lines would cross the names
    for r, row in enumerate(look.shortened(block.rows, 54)):
        if r:
            axes.axhline(r * step - APART / 2, color=look.GRID, linewidth=0.6)
        how: dict[str, Any] = {"xycoords": ("axes fraction", "data")}
        look.write(axes, 0, r * step + NAMED / 2, row, **how)
        if block.zero:
            ends = [r * step + NAMED, (r + 1) * step - APART]
            axes.plot([0, 0], ends, color=look.SOFT, linewidth=1.2)
        for s, one in enumerate(block.series):
            at = r * step + NAMED + TALL * (s + 0.5)
            _mark(axes, block, one, r, r if block.dots else s, at)
            look.write(axes, 1, at, block.format(one, r), right=8, **how)
    axes.set_ylim(step * max(len(block.rows), 1) - APART / 2, -0.06)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.margins(x=0.06)
    most = max(2, int((look.WIDTH - right) / 0.6))
    axes.xaxis.set_major_locator(MaxNLocator(most, steps=[1, 2, 5, 10]))
    axes.set_xlabel(block.x_label)
    if block.percent:
        _within_bounds(axes, block)
    look.number_ticks(axes.xaxis, block.percent, most=min(most, 4))
    look.keep_inside(axes)
    if len(block.series) > 1:
        marks = [_dot(s) for s in range(len(block.series))]
        look.legend(figure, [one.name for one in block.series], marks)
    return figure


def _mark(axes: Axes, block: Intervals, one: Marks, row: int, place: int, at: float) -> None:
    value, low, high = (side[row] for side in (one.values, one.low, one.high))
    if not is_number(value):
        return
    colour = look.SOFT if row in block.faint else look.colour_of(place)
    if is_number(low) and is_number(high):
        how: dict[str, Any] = {"linewidth": 2.2, "alpha": 0.55, "solid_capstyle": "butt"}
        axes.plot([low, high], [at, at], color=colour, **how)
    dot = _dot(place, colour)
    dot.set_data([value], [at])
    axes.add_line(dot)


def _dot(place: int, colour: str = "") -> Line2D:
    how: dict[str, Any] = {"marker": look.MARKERS[place % len(look.MARKERS)], "linestyle": ""}
    return Line2D([], [], color=colour or look.colour_of(place), markersize=6, **how)


def _within_bounds(axes: Axes, block: Intervals) -> None:
    """Limit an axis of shares to 0% to 100%, plus a small margin."""
    ends = [x for one in block.series for side in (one.low, one.high, one.values) for x in side]
    sound = [x for x in ends if is_number(x)]
    low, high = axes.get_xlim()
    if sound and min(sound) >= 0 and max(sound) <= 1:
        axes.set_xlim(max(low, -0.02), min(high, 1.02))


def _heat(block: Heat) -> Figure:
    values = np.array([look.floats(row) for row in block.values], dtype=float)
    values = values.reshape(len(block.row_names), len(block.column_names))
    if values.shape[1] > MOST_CELLS:
        edges = np.linspace(0, values.shape[1], MOST_CELLS + 1).astype(np.int64)
        values = np.add.reduceat(values, edges[:-1], axis=1) / np.diff(edges)  # means of neighbours
    num_rows, num_columns = values.shape
    rows, columns = (
        look.shortened(names, LONGEST_NAME) for names in (block.row_names, block.column_names)
    )
    shown_rows, shown_columns = len(rows) <= MOST_NAMES, len(columns) <= MOST_NAMES
    longest_row, longest = (
        min(max(map(columns_of, names), default=1), LONGEST_NAME)
        for names in (block.row_names, block.column_names)
    )
    left = (look.LETTERS * longest_row if shown_rows else 0.25) + 0.38
    width = look.WIDTH - left - 0.16
    upright = shown_columns and longest * look.LETTERS > width / max(num_columns, 1)
    named = 0.062 * longest if upright else 0.15  # inches; these letters are small
    below = named + (0.78 if block.column_label else 0.56)
    figure, axes = look.sheet(block.title, min(max(0.2 * num_rows, 1.2), 4.5), below, left, 0.16)
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
                on = look.PAPER if depth[i, j] > 0.6 else look.INK
                axes.text(j, i, text, ha="center", va="center", fontsize=6.5, color=on)
    for i, j in block.best:
        frame: dict[str, Any] = {"fill": False, "edgecolor": look.COLOURS[1], "linewidth": 2}
        axes.add_patch(Rectangle((j - 0.5, i - 0.5), 1, 1, clip_on=False, zorder=3, **frame))
    if sound.size:
        _colour_bar(figure, block, low, high)
    return figure


def _frame(axes: Axes, block: Heat | Tiles) -> None:
    axes.set_ylabel(block.row_label)
    axes.set_xlabel(block.column_label)
    axes.grid(False)
    axes.tick_params(length=0, labelsize=8)
    axes.spines[:].set_visible(True)
    axes.spines[:].set_color(look.GRID)


def _depth(
    block: Heat, share: look.Array
) -> look.Array:  # [...] in 0..1, of the way from least to most
    """The opacity of the colour: small shares are stretched; else the least stays visible."""
    depth: look.Array = np.sqrt(share) if block.shares else 0.06 + 0.94 * share
    return depth


def _shades(depth: look.Array) -> look.Array:  # [...] in 0..1 -> [..., 4]
    """One colour at different opacities, so that it fits both white paper and a dark page."""
    rgba = np.broadcast_to(to_rgba(look.SHADE), (*np.shape(depth), 4)).copy()
    rgba[..., 3] = np.nan_to_num(depth, nan=0.0)
    return rgba


def _colour_bar(figure: Figure, block: Heat, low: float, high: float) -> None:
    """Draw the colour bar at the lower right, with the least and the greatest value."""
    tall = figure.get_figheight()
    least, most = (format_label(value, block.percent) for value in (low, high))
    right, y = look.WIDTH - 0.16 - look.LETTERS * len(most) - 0.05, 0.14
    place = ((right - BAR) / look.WIDTH, (y - 0.05) / tall, BAR / look.WIDTH, 0.1 / tall)
    bar = figure.add_axes(place)
    bar.imshow(_shades(_depth(block, np.linspace(0, 1, 64)[None])), aspect="auto")
    bar.set_axis_off()
    how: dict[str, Any] = {"va": "center", "color": look.SOFT, "fontsize": 8}
    of = f"{block.value_label}  " if block.value_label else ""
    figure.text((right - BAR - 0.05) / look.WIDTH, y / tall, f"{of}{least}", ha="right", **how)
    figure.text((right + 0.05) / look.WIDTH, y / tall, most, ha="left", **how)


def _contours(block: Contours) -> Figure:
    figure, axes = look.sheet(block.title, look.HEIGHT, look.BOTTOM, left=0.72, right=0.2)
    z = np.array([look.floats(row) for row in block.z], dtype=float)
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
        depth = np.linspace(0.06, 1, len(levels) - 1)[:: -1 if block.lowest else 1]
        masked = np.ma.masked_invalid(z)
        axes.contourf(block.x, block.y, masked, levels=levels, colors=_shades(depth))
        axes.contour(
            block.x, block.y, masked, levels=levels[1:-1], colors=look.SOFT, linewidths=0.6
        )
    xs, ys = np.meshgrid(block.x, block.y)
    axes.update_datalim(np.column_stack([xs.ravel(), ys.ravel()]))
    how: dict[str, Any] = {"zorder": 3, "clip_on": False}
    axes.scatter(xs[measured], ys[measured], s=5, linewidths=0, color=look.SOFT, **how)
    if len(sound) <= NUMBERED and max(z.shape) <= 10:
        ends = {min(block.x): "left", max(block.x): "right"}
        halo = [withStroke(linewidth=2, foreground=look.PAPER)]  # readable on any shade
        for x, y, value in zip(xs[measured], ys[measured], sound, strict=True):
            # Without the unit, which the best has: neighbours would touch.
            words = f"{100 * value:.1f}" if block.percent else format_label(float(value))
            above = -7 if y == max(block.y) else 7  # a page cuts off text above the axes
            axes.annotate(words, (x, y), (0, above), textcoords="offset points", va="center",
                          ha=ends.get(x, "center"), fontsize=7, color=look.INK, path_effects=halo,
                          **how)  # fmt: skip
    if block.best is not None:
        x, y, best = block.best
        star: dict[str, Any] = {"color": look.COLOURS[1], "markeredgecolor": look.INK, "zorder": 4}
        axes.plot([x], [y], marker="*", markersize=13, clip_on=False, **star)
        label = f"best {format_label(best, block.percent)}"
        figure.text(1 - 0.2 / look.WIDTH, 0.2 / figure.get_figheight(), label, ha="right",
                    fontsize=8.5, color=look.INK, va="center")  # fmt: skip
    axes.set_xlabel(block.x_label)
    axes.set_ylabel(block.y_label)
    axes.grid(False)
    if block.x_names:
        axes.set_xticks(block.x, block.x_names)
    for axis, logarithmic in ((axes.xaxis, block.log_x), (axes.yaxis, block.log_y)):
        if logarithmic:
            look.plain_numbers(axis)
        if axis is axes.yaxis or not block.x_names:
            look.number_ticks(axis)
    look.keep_inside(axes)
    return figure


def _tiles(block: Tiles) -> Figure:
    counts = block.counts()
    colours = {kind: KINDS[place % len(KINDS)] for place, kind in enumerate(block.kinds)}
    image = np.zeros((max(len(block.row_names), 1), max(len(block.column_names), 1), 4))
    for i, row in enumerate(block.values):
        for j, kind in enumerate(row):
            if kind is not None:
                image[i, j] = to_rgba(colours[kind])
    longest = max(map(columns_of, block.row_names), default=1)
    left = look.LETTERS * min(longest, 12) + 0.42
    height = min(max(0.09 * len(block.row_names), 1.2), 4.5)
    below = 0.5 + look.LINE * len(counts) + 0.1
    figure, axes = look.sheet(block.title, height, below, left=left, right=0.16)
    axes.imshow(image, aspect="auto", interpolation="nearest")
    for axis, names in ((axes.yaxis, block.row_names), (axes.xaxis, block.column_names)):
        axis.set_major_locator(MaxNLocator(8, integer=True))
        named = {float(at): look.short(name, 12) for at, name in enumerate(names)}
        axis.set_major_formatter(FuncFormatter(lambda at, _, named=named: named.get(at, "")))
    _frame(axes, block)
    marks = [_square(colours[kind]) for kind in counts]
    look.legend(figure, [f"{kind}: {count:,}" for kind, count in counts.items()], marks)
    return figure


def _samples(block: Samples) -> Figure:
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
    height = (look.WIDTH - MOSAIC_NAMES - 0.1) * canvas.shape[0] / canvas.shape[1]
    figure, axes = look.sheet(block.title, height, 0.1, left=MOSAIC_NAMES, right=0.1)
    axes.imshow(canvas, interpolation="nearest", aspect="auto")
    axes.set_xticks([])
    places = [row * (tall + GAP) + tall / 2 for row in range(len(block.rows))]
    axes.set_yticks(places, [look.short(name, 16) for name, _ in block.rows])
    axes.grid(False)
    axes.spines[:].set_visible(False)
    return figure


FIGURES: dict[type[Block], Callable[[Any], Figure]] = {
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
    return next(draw(block) for kind, draw in FIGURES.items() if isinstance(block, kind))


def for_page(svg: str, name: str) -> str:
    """An SVG to embed in HTML: without title, with unique ids and the page's colours."""
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    svg = re.sub(rf'<g id="{look.TITLE}">.*?</g>', "", svg, count=1, flags=re.DOTALL)
    box = re.search(r'viewBox="0 0 (\S+) (\S+)"', svg)
    assert box is not None, "matplotlib writes the size of a figure so"
    top = 72 * look.TOP - 8  # points: the space of the removed title
    cut = f'viewBox="0 {top:g} {box[1]} {float(box[2]) - top:g}"'
    svg = re.sub(r"<svg [^>]*>", f"<svg {cut}>", svg, count=1)
    svg = svg.replace("xlink:href", "href")
    svg = re.sub(r' id="([^"]*)"', rf' id="{name}-\1"', svg)
    svg = re.sub(r'(href="|url\()#', rf"\1#{name}-", svg)
    inks = {look.INK: "var(--ink)", look.SOFT: "var(--soft)", look.GRID: "var(--grid)"}
    inks |= {colour: f"var(--run-{i})" for i, colour in enumerate(look.COLOURS)}
    painted = re.compile("|".join(inks))
    return re.sub(
        r'style="[^"]*"', lambda styled: painted.sub(lambda ink: inks[ink[0]], styled[0]), svg
    )
