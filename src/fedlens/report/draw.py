"""Blocks drawn with matplotlib, in one clean print style: PNG, SVG and PDF.

The SVG that stands in a page leaves its colours to the page: `var(--run-0)`, `var(--grid)`, ...
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from fedlens.files import write_atomically
from fedlens.report.blocks import (
    Bars,
    Contours,
    Curves,
    Heat,
    Line,
    Samples,
    Series,
    Strip,
    Tiles,
    Values,
)
from fedlens.report.look import (
    BOTTOM,
    COLOURS,
    DASHES,
    GRID,
    HEIGHT,
    INK,
    LETTERS,
    LINE,
    MARKERS,
    PAPER,
    SOFT,
    WIDTH,
    Array,
    any_script,
    colour_of,
    legend,
    line_mark,
    name_ends,
    percent_tick,
    print_look,
    shades,
    sheet,
    short,
    write,
)
from fedlens.report.mosaic import mosaic
from fedlens.report.numbers import format_number
from fedlens.report.pictures import FORMATS, Drawn, places
from fedlens.report.tiles import tiles
from fedlens.runs.records import is_number

BESIDE = 16  # letters of names that fit beside bars
FEW = 6  # lines whose last values still fit in the margin
MOST_CELLS = 1000  # in a row of a heat map that can still be seen
MOST_NAMES = 40  # beside a heat map
NUMBERED = 130  # cells that have room for their numbers


def save(block: Drawn, folder: Path, formats: Sequence[str] = FORMATS) -> str:
    """Write a block's picture to `folder`, a file a format; the SVG for a page is returned."""
    drawn = pictures(block, {"svg", *formats})
    for kind in formats:
        write_atomically(folder / f"{block.slug}.{kind}", drawn[kind])
    return for_page(drawn["svg"].decode(), block.slug)


def pictures(block: Drawn, formats: Sequence[str] | set[str] = FORMATS) -> dict[str, bytes]:
    """The content of a file by format: png, svg, pdf. The same block gives the same bytes."""
    no_date = {"png": {"Software": None}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}
    with print_look(), any_script():
        figure = _figure(block)
        files = {}
        for kind in formats:
            file = io.BytesIO()
            clear = kind == "svg"
            figure.savefig(file, format=kind, dpi=240, metadata=no_date[kind], transparent=clear)
            files[kind] = file.getvalue()
    return files


def _figure(block: Drawn) -> Figure:
    match block:
        case Curves():
            return _curves(block.thinned())
        case Bars():
            return _bars(block)
        case Heat():
            return _heat(block)
        case Tiles():
            return tiles(block)
        case Contours():
            return _contours(block)
        case Strip():
            return _strip(block)
        case Samples():
            return mosaic(block)


def _curves(block: Curves) -> Figure:
    place = places(block.lines)
    labels = {line.name: line.name for line in block.lines}
    for line in block.lines:
        if line.note:
            labels[line.name] = f"{short(line.name, 48 - len(line.note))}: {line.note}"
    meant = block.styles if len(block.styles) > 1 else {}
    keys = [Line2D([], [], color=SOFT, linestyle=DASHES[one]) for one in meant]
    figure, axes = sheet(block.title, HEIGHT, BOTTOM + LINE * (len(labels) + len(keys)) + 0.1)
    ends = []
    for line in block.lines:
        _line(axes, line, place[line.name])
        ys = [y for y in line.y if is_number(y)]
        if ys and line.style == "solid":
            ends.append((ys[-1], format_number(ys[-1], block.percent), colour_of(place[line.name])))
    for name, height in block.levels:
        axes.axhline(height, color=SOFT, linewidth=1.1, linestyle=DASHES["dashed"])
        write(axes, 0.99, height, name, xycoords=("axes fraction", "data"), ha="right", va="bottom")
    _scale(axes, block)
    if len(ends) <= FEW:
        name_ends(axes, ends)
    styles = {
        line.name: line.style for line in sorted(block.lines, key=lambda one: one.style == "solid")
    }
    marks = [line_mark(i, styles[name]) for name, i in place.items()]
    legend(figure, [*labels.values(), *meant.values()], [*marks, *keys])
    return figure


def _line(axes: Axes, line: Line, place: int) -> None:
    solid, colour = line.style == "solid", colour_of(place)
    ys = _floats(line.y)
    if line.low is not None and line.high is not None:
        low, high = _floats(line.low), _floats(line.high)
        axes.fill_between(line.x, low, high, color=colour, alpha=0.18, linewidth=0)
    axes.plot(
        line.x,
        ys,
        color=colour,
        linestyle=DASHES[line.style],
        linewidth=1.9 if solid else 1.1,
        alpha=1.0 if solid else 0.75,
        marker=MARKERS[place % len(MARKERS)] if solid or len(ys) == 1 else "",
        markersize=4,
        markevery=(min(2 * place, max(0, len(ys) - 1)), max(1, len(ys) // 6)),
    )
    if line.ring is not None:
        look: dict[str, Any] = {"markersize": 9, "markerfacecolor": "none", "markeredgewidth": 1.5}
        axes.plot(*[[at] for at in line.ring], color=colour, marker="o", **look)


def _scale(axes: Axes, block: Curves) -> None:
    axes.set_xlabel(block.x_label)
    if block.log_x and _can_be_logarithmic([line.x for line in block.lines]):
        axes.set_xscale("log")
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    else:
        xs = [x for line in block.lines for x in line.x]
        first, last = min(xs, default=0), max(xs, default=1)
        whole = all(x == int(x) for x in xs)
        room = max(0.5 if whole else 0, 0.02 * (last - first))
        if first == last:
            room = max(0.5, 0.02 * abs(last))
        axes.set_xlim(first - room, last + room)
        axes.xaxis.set_major_locator(MaxNLocator(8, integer=whole, steps=[1, 2, 5, 10]))
    if block.percent:
        axes.yaxis.set_major_formatter(FuncFormatter(percent_tick))
    if block.log_y and _can_be_logarithmic([line.y for line in block.lines]):
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(numticks=6))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))


def _bars(block: Bars) -> Figure:
    longest = max(map(len, block.groups), default=0)
    beside = len(block.series) == 1 and longest <= BESIDE  # names stand beside the bars, else above
    tall, pad, named = (0.2, 0.04, 0.0) if beside else (0.24, 0.16, 0.2)  # inches
    step = named + tall * len(block.series) + pad
    key = 0 if len(block.series) == 1 else LINE * len(block.series) + 0.1
    left = LETTERS * longest + 0.2 if beside else 0.12
    figure, axes = sheet(block.title, step * len(block.groups), 0.32 + key, left)
    ends = [0.0]
    for g, group in enumerate(block.groups):
        if beside:
            where: Any = ("axes fraction", "data")
            write(axes, 0, g * step + tall / 2, group, -5, xycoords=where, ha="right")
        else:
            write(axes, 0, g * step + named / 2, short(group, 48))
        for s, series in enumerate(block.series):
            at = g * step + named + tall * (s + 0.5)
            ends += _bar(axes, block, series, g, at, 0.86 * tall, colour_of(g if block.dots else s))
    axes.set_ylim(step * len(block.groups), -0.04)
    room = 1.45 if any(series.errors for series in block.series) else 1.0  # for "19.3% ± 10.0%"
    ticks = MaxNLocator(6, steps=[1, 2, 5, 10]).tick_values(min(ends), max(ends) or 1)
    axes.set_xticks(ticks)  # none stands where only words are: no accuracy is 120%
    axes.spines["bottom"].set_bounds(ticks[0], ticks[-1])
    axes.set_xlim(ticks[0], max(ticks[-1], max(ends) * room))
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.grid(False)
    if block.percent:
        axes.xaxis.set_major_formatter(FuncFormatter(percent_tick))
    if len(block.series) > 1:
        look: dict[str, Any] = {"marker": "s", "linestyle": "", "markersize": 7}
        marks = [
            Line2D([], [], color=colour_of(i), markerfacecolor=_face(series, colour_of(i)), **look)
            for i, series in enumerate(block.series)
        ]
        legend(figure, [series.name for series in block.series], marks)
    return figure


def _bar(
    axes: Axes, block: Bars, series: Series, place: int, at: float, tall: float, colour: str
) -> tuple[float, float]:
    """One bar with its number; how far it reaches to the left and to the right."""
    height, error = series.heights[place], series.errors[place] if series.errors else None
    if not is_number(height):
        write(axes, 0, at, format_number(None), right=5)
        return 0.0, 0.0
    look: dict[str, Any] = {"color": _face(series, colour), "edgecolor": colour, "linewidth": 1.2}
    axes.barh(at, height, height=tall, **look)
    end, words = max(height, 0.0), block.format(height)
    if is_number(error):
        axes.errorbar(height, at, xerr=error, color=INK, linewidth=1.2, capsize=2.5)
        end, words = max(height + error, 0.0), f"{words} ± {block.format(error)}"
    write(axes, end, at, words, right=5, weight="bold")
    return min(height - (error or 0.0), 0.0), end


def _face(series: Series, colour: str) -> str:
    return "none" if series.hollow else colour


def _heat(block: Heat) -> Figure:
    values = np.array([_floats(row) for row in block.values], dtype=float)
    values = values.reshape(len(block.row_names), len(block.column_names))
    if values.shape[1] > MOST_CELLS:
        values = _thinned(values)
    num_rows, num_columns = values.shape
    names = [short(name, 22) for name in block.row_names]
    shown_rows = len(names) <= MOST_NAMES
    shown_columns = len(block.column_names) <= MOST_NAMES
    upright = max(map(len, block.column_names), default=0) > 3 and shown_columns
    left = (LETTERS * max(map(len, names), default=1) if shown_rows else 0.25) + 0.38
    below = LETTERS * min(max(map(len, block.column_names), default=1), 22) if upright else 0.15
    below += 0.52
    width = WIDTH - left - 0.16
    height = min(max(0.2 * num_rows, 1.2), 4.5)
    figure, axes = sheet(block.title, height, below, left=left, right=0.16)
    sound = values[np.isfinite(values)]
    low = 0.0 if block.shares or not sound.size else float(sound.min())
    high = float(sound.max()) if sound.size else 1.0
    depth = np.clip((values - low) / ((high - low) or 1.0), 0, 1)
    depth = np.sqrt(depth) if block.shares else 0.06 + 0.94 * depth
    axes.imshow(shades(depth), aspect="auto", interpolation="nearest")
    _ticks(axes.yaxis, names, shown_rows)
    columns = [short(name, 22) for name in block.column_names]
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
                text = f"{100 * value:.0f}" if block.percent else format_number(float(value))
                on = PAPER if depth[i, j] > 0.6 else INK
                axes.text(j, i, text, ha="center", va="center", fontsize=6.5, color=on)
    if sound.size:
        of = f" ({block.value_label})" if block.value_label else ""
        faint, full = (format_number(value, block.percent) for value in (low, high))
        scale = f"faint to full: {faint} to {full}{of}"
        place = 1 - 0.16 / WIDTH, 0.1 / figure.get_figheight()
        figure.text(*place, scale, ha="right", va="center", color=SOFT, fontsize=8)
    return figure


def _contours(block: Contours) -> Figure:
    figure, axes = sheet(block.title, HEIGHT, BOTTOM, left=0.72, right=0.2)
    z = np.array([_floats(row) for row in block.z], dtype=float)
    sound = z[np.isfinite(z)]
    if block.log_x:
        axes.set_xscale("log")
    if block.log_y:
        axes.set_yscale("log")
    if min(z.shape) >= 2 and sound.size and sound.min() < sound.max():
        levels = np.linspace(sound.min(), sound.max(), 9)
        depth = np.linspace(1, 0.06, 8) if block.lowest else np.linspace(0.06, 1, 8)
        masked = np.ma.masked_invalid(z)
        axes.contourf(block.x, block.y, masked, levels=levels, colors=shades(depth))
        drawn = axes.contour(block.x, block.y, masked, levels=levels[1:-1], colors=SOFT,
                             linewidths=0.6)  # fmt: skip
        axes.clabel(drawn, fontsize=7, fmt=lambda value: format_number(float(value), block.percent))
    xs, ys = np.meshgrid(block.x, block.y)
    axes.scatter(xs, ys, s=5, color=SOFT, linewidths=0, zorder=3)
    if block.best is not None:
        x, y, best = block.best
        axes.plot([x], [y], marker="*", markersize=13, color=COLOURS[1], markeredgecolor=INK)
        label = f"best {format_number(best, block.percent)}"
        figure.text(1 - 0.2 / WIDTH, 0.2 / figure.get_figheight(), label, ha="right",
                    fontsize=8.5, color=INK, va="center")  # fmt: skip
    axes.set_xlabel(block.x_label)
    axes.set_ylabel(block.y_label)
    axes.grid(False)
    for axis, logarithmic in ((axes.xaxis, block.log_x), (axes.yaxis, block.log_y)):
        if logarithmic:
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axis.set_minor_formatter(NullFormatter())
    return figure


def _strip(block: Strip) -> Figure:
    figure, axes = sheet(block.title, 0.52 * len(block.groups), BOTTOM, left=0.16, right=0.2)
    for g, (name, values) in enumerate(block.groups):
        xs = sorted(x for x in values if is_number(x))
        write(axes, 0, g + 0.06, short(name, 48), xycoords=("axes fraction", "data"), va="top")
        if not xs:
            continue
        spread = (np.arange(len(xs)) * 0.6180339887 % 1 - 0.5) * 0.36  # a jitter that is no chance
        size = float(np.clip(900 / len(xs), 2, 18))
        axes.scatter(xs, g + 0.7 + spread, s=size, color=colour_of(g), alpha=0.6, linewidths=0,
                     rasterized=len(xs) > 2000)  # fmt: skip
        axes.plot([block.stroke(g)] * 2, [g + 0.48, g + 0.92], color=INK, linewidth=1.6)
    axes.set_ylim(len(block.groups) or 1, 0)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.grid(True, axis="x")
    axes.set_xlabel(block.x_label)
    if block.percent:
        axes.xaxis.set_major_formatter(FuncFormatter(percent_tick))
    return figure


def _ticks(axis: Any, names: Sequence[str], shown: bool, rotation: int = 0) -> None:
    if shown:
        axis.set_ticks(range(len(names)), names, rotation=rotation)
    else:
        axis.set_major_locator(MaxNLocator(8, integer=True))


def _thinned(values: Array) -> Array:  # [rows, columns] -> [rows, MOST_CELLS]
    """Means of neighbouring columns, where there are too many to see."""
    edges = np.linspace(0, values.shape[1], MOST_CELLS + 1).astype(np.int64)
    sums: Array = np.add.reduceat(values, edges[:-1], axis=1) / np.diff(edges)
    return sums


def _can_be_logarithmic(many: Sequence[Values]) -> bool:
    return any(is_number(value) and value > 0 for values in many for value in values)


def _floats(values: Values) -> list[float]:
    return [float(y) if is_number(y) else math.nan for y in values]


def for_page(svg: str, name: str) -> str:
    """An SVG to stand inside HTML: no addresses, ids of its own, colours left to the page."""
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    svg = re.sub(r'<svg [^>]*?(viewBox="[^"]*")[^>]*>', r"<svg \1>", svg, count=1)
    svg = svg.replace("xlink:href", "href")
    svg = re.sub(r' id="([^"]*)"', rf' id="{name}-\1"', svg)
    svg = re.sub(r'(href="|url\()#', rf"\1#{name}-", svg)
    inks = {INK: "var(--ink)", SOFT: "var(--soft)", GRID: "var(--grid)"}
    inks |= {colour: f"var(--run-{i})" for i, colour in enumerate(COLOURS)}
    painted = re.compile("|".join(inks))
    return re.sub(
        r'style="[^"]*"', lambda styled: painted.sub(lambda ink: inks[ink[0]], styled[0]), svg
    )
