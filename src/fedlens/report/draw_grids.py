"""Draws blocks with two axes: heat maps with their colour bar, and contours."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

from fedlens.report.grids import Contours, Heat
from fedlens.report.look import (
    BOTTOM,
    COLOURS,
    GRID,
    HEIGHT,
    INK,
    LETTERS,
    PAPER,
    SOFT,
    WIDTH,
    Array,
    floats,
    keep_inside,
    large_ticks,
    shades,
    sheet,
    shortened,
)
from fedlens.report.numbers import format_label
from fedlens.report.tables import columns_of

MOST_CELLS = 1000  # in a row of a heat map: more cannot be seen
MOST_NAMES = 40  # up to this many rows or columns are labelled with their names
LONGEST_NAME = 24  # characters
NUMBERED = 130  # up to this many cells have room for their numbers
BAR = 1.0  # inches: length of a colour bar


def heat(block: Heat) -> Figure:
    values = np.array([floats(row) for row in block.values], dtype=float)
    values = values.reshape(len(block.row_names), len(block.column_names))
    if values.shape[1] > MOST_CELLS:
        values = _thinned(values)
    num_rows, num_columns = values.shape
    rows, columns = (
        shortened(names, LONGEST_NAME) for names in (block.row_names, block.column_names)
    )
    shown_rows, shown_columns = len(rows) <= MOST_NAMES, len(columns) <= MOST_NAMES
    left = (LETTERS * _longest(rows) if shown_rows else 0.25) + 0.38
    width = WIDTH - left - 0.16
    longest = _longest(columns)
    upright = shown_columns and longest * LETTERS > width / max(num_columns, 1)
    named = 0.062 * longest if upright else 0.15  # inches; these letters are small
    below = named + (0.78 if block.column_label else 0.56)
    figure, axes = sheet(block.title, min(max(0.2 * num_rows, 1.2), 4.5), below, left, 0.16)
    sound = values[np.isfinite(values)]
    low = 0.0 if block.shares or not sound.size else float(sound.min())
    high = float(sound.max()) if sound.size else 1.0
    depth = _depth(block, np.clip((values - low) / ((high - low) or 1.0), 0, 1))
    ends = -0.5, len(columns) - 0.5, num_rows - 0.5, -0.5  # counts columns before thinning
    axes.imshow(shades(depth), aspect="auto", interpolation="nearest", extent=ends)
    _ticks(axes.yaxis, rows, shown_rows)
    _ticks(axes.xaxis, columns, shown_columns, 90 if upright else 0)
    axes.set_ylabel(block.row_label)
    axes.set_xlabel(block.column_label)
    axes.grid(False)
    axes.tick_params(length=0, labelsize=8)
    axes.spines[:].set_visible(True)
    axes.spines[:].set_color(GRID)
    if num_rows * num_columns <= NUMBERED and width / max(num_columns, 1) > 0.26:
        for (i, j), value in np.ndenumerate(values):
            if math.isfinite(value):
                share = f"{100 * value:.{block.digits}f}"
                text = share if block.percent else format_label(float(value))
                on = PAPER if depth[i, j] > 0.6 else INK
                axes.text(j, i, text, ha="center", va="center", fontsize=6.5, color=on)
    for i, j in block.best:
        axes.add_patch(_ring(i, j))
    if sound.size:
        _colour_bar(figure, block, low, high)
    return figure


def _longest(names: Sequence[str]) -> int:
    """The width of the longest name in characters, at most `LONGEST_NAME`."""
    return min(max(map(columns_of, names), default=1), LONGEST_NAME)


def _depth(block: Heat, share: Array) -> Array:  # [...] in 0..1, of the way from least to most
    """The opacity of the colour: small shares are stretched; else the least stays visible."""
    depth: Array = np.sqrt(share) if block.shares else 0.06 + 0.94 * share
    return depth


def _ring(row: int, column: int) -> Any:
    from matplotlib.patches import Rectangle

    place = column - 0.5, row - 0.5
    return Rectangle(place, 1, 1, fill=False, edgecolor=COLOURS[1], linewidth=2, clip_on=False,
                     zorder=3)  # fmt: skip


def _colour_bar(figure: Figure, block: Heat, low: float, high: float) -> None:
    """Draw the colour bar at the lower right, with the least and the greatest value."""
    tall = figure.get_figheight()
    least, most = (format_label(value, block.percent) for value in (low, high))
    right, y = WIDTH - 0.16 - LETTERS * len(most) - 0.05, 0.14
    place = ((right - BAR) / WIDTH, (y - 0.05) / tall, BAR / WIDTH, 0.1 / tall)
    bar = figure.add_axes(place)
    bar.imshow(shades(_depth(block, np.linspace(0, 1, 64)[None])), aspect="auto")
    bar.set_axis_off()
    look: dict[str, Any] = {"va": "center", "color": SOFT, "fontsize": 8}
    of = f"{block.value_label}  " if block.value_label else ""
    figure.text((right - BAR - 0.05) / WIDTH, y / tall, f"{of}{least}", ha="right", **look)
    figure.text((right + 0.05) / WIDTH, y / tall, most, ha="left", **look)


def contours(block: Contours) -> Figure:
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
        depth = np.linspace(0.06, 1, len(levels) - 1)[:: -1 if block.lowest else 1]
        masked = np.ma.masked_invalid(z)
        axes.contourf(block.x, block.y, masked, levels=levels, colors=shades(depth))
        axes.contour(block.x, block.y, masked, levels=levels[1:-1], colors=SOFT, linewidths=0.6)
    xs, ys = np.meshgrid(block.x, block.y)
    axes.update_datalim(np.column_stack([xs.ravel(), ys.ravel()]))
    look: dict[str, Any] = {"zorder": 3, "clip_on": False}
    axes.scatter(xs[measured], ys[measured], s=5, linewidths=0, color=SOFT, **look)
    if len(sound) <= NUMBERED and max(z.shape) <= 10:
        ends = {min(block.x): "left", max(block.x): "right"}
        halo = [withStroke(linewidth=2, foreground=PAPER)]  # readable on any shade
        for x, y, value in zip(xs[measured], ys[measured], sound, strict=True):
            # Without the unit, which the best has: neighbours would touch.
            words = f"{100 * value:.1f}" if block.percent else format_label(float(value))
            above = -7 if y == max(block.y) else 7  # a page cuts off text above the axes
            axes.annotate(words, (x, y), (0, above), textcoords="offset points", va="center",
                          ha=ends.get(x, "center"), fontsize=7, color=INK, path_effects=halo,
                          **look)  # fmt: skip
    if block.best is not None:
        x, y, best = block.best
        star: dict[str, Any] = {"color": COLOURS[1], "markeredgecolor": INK, "zorder": 4}
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
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axis.set_minor_formatter(NullFormatter())
        if axis is axes.yaxis or not block.x_names:
            large_ticks(axis)
    keep_inside(axes)
    return figure


def _ticks(axis: Any, names: Sequence[str], shown: bool, rotation: int = 0) -> None:
    if shown:
        axis.set_ticks(range(len(names)), names, rotation=rotation)
    else:
        axis.set_major_locator(MaxNLocator(8, integer=True))


def _thinned(values: Array) -> Array:  # [rows, columns] -> [rows, MOST_CELLS]
    """Means of neighbouring columns, for matrices with too many columns to see."""
    edges = np.linspace(0, values.shape[1], MOST_CELLS + 1).astype(np.int64)
    sums: Array = np.add.reduceat(values, edges[:-1], axis=1) / np.diff(edges)
    return sums
