"""Draws values with their intervals: one row each, with the numbers at its right."""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator

from fedlens.report.blocks import Intervals, Marks
from fedlens.report.look import (
    GRID,
    LETTERS,
    LINE,
    MARKERS,
    SOFT,
    WIDTH,
    colour_of,
    keep_inside,
    large_ticks,
    legend,
    percent_tick,
    sheet,
    shortened,
    write,
)
from fedlens.runs.records import is_number

TALL, NAMED, APART = 0.2, 0.2, 0.12  # inches: height of a value, of a row's name, gap of rows


def intervals(block: Intervals) -> Figure:
    step = NAMED + TALL * len(block.series) + APART
    key = LINE * len(block.series) + 0.1 if len(block.series) > 1 else 0.0
    told = [block.format(one, i) for one in block.series for i in range(len(block.rows))]
    right = LETTERS * max(map(len, told), default=1) + 0.2
    figure, axes = sheet(block.title, step * max(len(block.rows), 1), 0.5 + key, 0.16, right)
    axes.grid(False)  # lines would cross the names
    for r, row in enumerate(shortened(block.rows, 54)):
        if r:
            axes.axhline(r * step - APART / 2, color=GRID, linewidth=0.6)
        look: dict[str, Any] = {"xycoords": ("axes fraction", "data")}
        write(axes, 0, r * step + NAMED / 2, row, **look)
        if block.zero:
            ends = [r * step + NAMED, (r + 1) * step - APART]
            axes.plot([0, 0], ends, color=SOFT, linewidth=1.2)
        for s, one in enumerate(block.series):
            at = r * step + NAMED + TALL * (s + 0.5)
            _mark(axes, block, one, r, r if block.dots else s, at)
            write(axes, 1, at, block.format(one, r), right=8, **look)
    axes.set_ylim(step * max(len(block.rows), 1) - APART / 2, -0.06)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.margins(x=0.06)
    most = max(2, int((WIDTH - right) / 0.6))
    axes.xaxis.set_major_locator(MaxNLocator(most, steps=[1, 2, 5, 10]))
    axes.set_xlabel(block.x_label)
    if block.percent:
        _within_bounds(axes, block)
        axes.xaxis.set_major_formatter(FuncFormatter(percent_tick))
    else:
        large_ticks(axes.xaxis, most=min(most, 4))
    keep_inside(axes)
    if len(block.series) > 1:
        marks = [_dot(s) for s in range(len(block.series))]
        legend(figure, [one.name for one in block.series], marks)
    return figure


def _mark(axes: Axes, block: Intervals, one: Marks, row: int, place: int, at: float) -> None:
    value, low, high = (side[row] for side in (one.values, one.low, one.high))
    if not is_number(value):
        return
    colour = SOFT if row in block.faint else colour_of(place)
    if is_number(low) and is_number(high):
        look: dict[str, Any] = {"linewidth": 2.2, "alpha": 0.55, "solid_capstyle": "butt"}
        axes.plot([low, high], [at, at], color=colour, **look)
    dot = _dot(place, colour)
    dot.set_data([value], [at])
    axes.add_line(dot)


def _dot(place: int, colour: str = "") -> Line2D:
    look: dict[str, Any] = {"marker": MARKERS[place % len(MARKERS)], "linestyle": ""}
    return Line2D([], [], color=colour or colour_of(place), markersize=6, **look)


def _within_bounds(axes: Axes, block: Intervals) -> None:
    """Limit an axis of shares to 0% to 100%, plus a small margin."""
    ends = [x for one in block.series for side in (one.low, one.high, one.values) for x in side]
    sound = [x for x in ends if is_number(x)]
    low, high = axes.get_xlim()
    if sound and min(sound) >= 0 and max(sound) <= 1:
        axes.set_xlim(max(low, -0.02), min(high, 1.02))
