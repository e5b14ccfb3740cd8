"""Draws tiles: a matrix whose cells are categories (kinds), one colour each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator

from fedlens.report.grids import Tiles
from fedlens.report.look import GRID, LETTERS, LINE, legend, sheet, short
from fedlens.report.tables import columns_of

COLOURS = (  # the first is for the normal kind; all fit both white paper and a dark page
    *("#8db9dd", "#c3c9d1", "#e39b2d", "#8a94a1", "#a9805a"),
    *("#d0506b", "#8e3fa8", "#5a4fc4", "#2b8f6b", "#3a3f47"),
)


def tiles(block: Tiles) -> Figure:
    counts = block.counts()
    colours = [to_rgba(COLOURS[place % len(COLOURS)]) for place in range(len(block.kinds))]
    places = {kind: place for place, kind in enumerate(block.kinds)}
    image = np.zeros((max(len(block.row_names), 1), max(len(block.column_names), 1), 4))
    for i, row in enumerate(block.values):
        for j, kind in enumerate(row):
            if kind is not None:
                image[i, j] = colours[places[kind]]
    longest = max(map(columns_of, block.row_names), default=1)
    left = LETTERS * min(longest, 12) + 0.42
    height = min(max(0.09 * len(block.row_names), 1.2), 4.5)
    below = 0.5 + LINE * len(counts) + 0.1
    figure, axes = sheet(block.title, height, below, left=left, right=0.16)
    axes.imshow(image, aspect="auto", interpolation="nearest")
    for axis, names in ((axes.yaxis, block.row_names), (axes.xaxis, block.column_names)):
        axis.set_major_locator(MaxNLocator(8, integer=True))
        axis.set_major_formatter(FuncFormatter(_named(names)))
    axes.set_ylabel(block.row_label)
    axes.set_xlabel(block.column_label)
    axes.grid(False)
    axes.tick_params(length=0, labelsize=8)
    axes.spines[:].set_visible(True)
    axes.spines[:].set_color(GRID)
    marks = [
        Line2D([], [], marker="s", linestyle="", markersize=7, color=colours[places[kind]])
        for kind in counts
    ]
    legend(figure, [f"{kind}: {count:,}" for kind, count in counts.items()], marks)
    return figure


def _named(names: Sequence[str]) -> Callable[[float, Any], str]:
    def name(at: float, _: Any) -> str:
        return short(names[int(at)], 12) if at == int(at) and 0 <= at < len(names) else ""

    return name
