"""Draws blocks with matplotlib in one print style, as PNG, SVG and PDF.

The SVG inside a page uses the page's colours: `var(--run-0)`, `var(--grid)`, ...
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from fedlens.report.blocks import (
    Bars,
    Curves,
    Intervals,
    Line,
    Samples,
    Series,
    Strip,
    Values,
)
from fedlens.report.draw_grids import contours, heat
from fedlens.report.draw_intervals import intervals
from fedlens.report.fonts import find_letters
from fedlens.report.grids import Contours, Heat, Tiles
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
    RIGHT,
    SOFT,
    TITLE,
    TOP,
    WIDTH,
    any_script,
    colour_of,
    floats,
    keep_inside,
    large_ticks,
    legend,
    line_mark,
    name_ends,
    percent_tick,
    print_look,
    sheet,
    short,
    shortened,
    strokes,
    write,
)
from fedlens.report.mosaic import mosaic
from fedlens.report.numbers import format_label, format_number
from fedlens.report.pictures import FEW, FORMATS, Drawn, places
from fedlens.report.tables import columns_of
from fedlens.report.tiles import tiles
from fedlens.runs.records import is_number
from fedlens.storage.files import write_atomically

FEW_POINTS = 12  # up to this many points of a line, each has a marker
BESIDE = 22  # names up to this many characters fit beside their bars


def save(block: Drawn, folder: Path, formats: Sequence[str] = FORMATS) -> str:
    """Write a block's picture to `folder`, one file per format; return the SVG for a page."""
    drawn = pictures(block, {"svg", *formats})
    for kind in formats:
        write_atomically(folder / f"{block.slug}.{kind}", drawn[kind])
    return for_page(drawn["svg"].decode(), block.slug)


def pictures(block: Drawn, formats: Sequence[str] | set[str] = FORMATS) -> dict[str, bytes]:
    """The file contents by format: png, svg, pdf. The same block gives the same bytes."""
    no_date = {"png": {"Software": None}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}
    with print_look(), any_script():
        figure = _figure(block)
        find_letters(figure)
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
            return heat(block)
        case Tiles():
            return tiles(block)
        case Contours():
            return contours(block)
        case Intervals():
            return intervals(block)
        case Strip():
            return _strip(block)
        case Samples():
            return mosaic(block)


def _curves(block: Curves) -> Figure:
    place = places(block.lines)
    block = replace(block, lines=[line for line in block.lines if not line.off])
    place = {line.name: place[line.name] for line in block.lines}
    notes = {line.name: line.note for line in block.lines if line.note}
    room = 52 - max((len(note) + 2 for note in notes.values()), default=0)
    labels = dict(zip(place, shortened(list(place), room), strict=True))
    labels |= {name: f"{labels[name]}: {note}" for name, note in notes.items()}
    meant = block.styles if len(block.styles) > 1 else {}
    keys = [(meant[one], Line2D([], [], color=SOFT, linestyle=DASHES[one])) for one in meant]
    keys += [
        (f"{name}: {format_number(height, block.percent)}", _level())
        for name, height in block.levels
    ]
    figure, axes = sheet(block.title, HEIGHT, BOTTOM + LINE * (len(labels) + len(keys)) + 0.1)
    ends = []
    banded = len(place) <= block.most_bands
    for line in block.lines:
        _line(axes, line, place[line.name], banded)
        ys = [y for y in line.y if is_number(y)]
        if ys and line.style == "solid":
            ends.append((ys[-1], format_label(ys[-1], block.percent), colour_of(place[line.name])))
    for _, height in block.levels:
        axes.add_line(_level()).set_data((0, 1), (height, height))
        axes.lines[-1].set_transform(axes.get_yaxis_transform())
        axes.update_datalim([(0, height)], updatex=False)
    _scale(axes, block)
    if len(ends) <= FEW:
        name_ends(axes, ends)
    keep_inside(axes)
    styles = {
        line.name: line.style for line in sorted(block.lines, key=lambda one: one.style == "solid")
    }
    marks = [line_mark(i, styles[name]) for name, i in place.items()]
    legend(figure, [*labels.values(), *(name for name, _ in keys)], [*marks, *(m for _, m in keys)])
    return figure


def _level() -> Line2D:
    return Line2D([], [], color=SOFT, linewidth=1.1, linestyle=DASHES["dotted"])


def _line(axes: Axes, line: Line, place: int, banded: bool) -> None:
    solid, colour = line.style == "solid", colour_of(place)
    ys = floats(line.y)
    if banded and line.low is not None and line.high is not None:
        low, high = floats(line.low), floats(line.high)
        axes.fill_between(line.x, low, high, color=colour, alpha=0.18, linewidth=0)
    axes.plot(
        line.x,
        ys,
        color=colour,
        linestyle=DASHES[line.style],
        marker=MARKERS[place % len(MARKERS)] if solid or len(ys) == 1 else "",
        markersize=4,
        # Few points: all have markers. Many: some have, shifted so that lines' markers differ.
        markevery=1 if len(ys) <= FEW_POINTS else (min(2 * place, len(ys) - 1), len(ys) // 6),
        **strokes(line.style),
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
        _keep_to_shares(axes, block)
    if block.log_y and _can_be_logarithmic([line.y for line in block.lines]):
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(numticks=6))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    large_ticks(axes.xaxis)
    if not block.percent:
        large_ticks(axes.yaxis)


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
    key = 0 if len(block.series) == 1 else LINE * len(block.series) + 0.1
    left = LETTERS * longest + 0.2 if beside else 0.12
    figure, axes = sheet(block.title, step * len(block.groups), 0.32 + key, left)
    ends = [0.0]
    for g, group in enumerate(shortened(block.groups, 48)):
        if beside:
            where: Any = ("axes fraction", "data")
            write(axes, 0, g * step + tall / 2, group, -5, xycoords=where, ha="right")
        else:
            write(axes, 0, g * step + named / 2, group)
        for s, series in enumerate(block.series):
            at = g * step + named + tall * (s + 0.5)
            ends += _bar(axes, block, series, g, at, 0.86 * tall, colour_of(g if block.dots else s))
    axes.set_ylim(step * len(block.groups), -0.04)
    heights = [y for series in block.series for y in series.heights if is_number(y)]
    room = 1.45 if any(series.errors for series in block.series) else 1.0  # for "19.3% ± 10.0%"
    large = not block.percent and large_ticks(axes.xaxis)
    most = max(2, int((WIDTH - left - RIGHT) / room / 0.8)) if large else 6
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
    if block.percent:
        axes.xaxis.set_major_formatter(FuncFormatter(percent_tick))
    keep_inside(axes)
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
    """Draw one bar with its number; return its left and right end, error bar included."""
    height, error = series.heights[place], series.errors[place] if series.errors else None
    if not is_number(height):
        write(axes, 0, at, format_number(None), right=5)
        return 0.0, 0.0
    look: dict[str, Any] = {"color": _face(series, colour), "edgecolor": colour, "linewidth": 1.2}
    axes.barh(at, height, height=tall, **look)
    end, words = max(height, 0.0), block.label(height)
    if is_number(error):
        axes.errorbar(height, at, xerr=error, color=INK, linewidth=1.2, capsize=2.5)
        end, words = max(height + error, 0.0), f"{words} ± {block.label(error)}"
    write(axes, end, at, words, right=5, weight="bold")
    return min(height - (error or 0.0), 0.0), end


def _face(series: Series, colour: str) -> str:
    return "none" if series.hollow else colour


def _strip(block: Strip) -> Figure:
    figure, axes = sheet(block.title, 0.52 * len(block.groups), BOTTOM, left=0.16, right=0.2)
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
    if block.percent:
        axes.xaxis.set_major_formatter(FuncFormatter(percent_tick))
    else:
        large_ticks(axes.xaxis)
    keep_inside(axes)
    return figure


def _can_be_logarithmic(many: Sequence[Values]) -> bool:
    return any(is_number(value) and value > 0 for values in many for value in values)


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
    inks = {INK: "var(--ink)", SOFT: "var(--soft)", GRID: "var(--grid)"}
    inks |= {colour: f"var(--run-{i})" for i, colour in enumerate(COLOURS)}
    painted = re.compile("|".join(inks))
    return re.sub(
        r'style="[^"]*"', lambda styled: painted.sub(lambda ink: inks[ink[0]], styled[0]), svg
    )
