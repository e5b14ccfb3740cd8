"""The map of a geographic partition: where each client's examples were taken."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from fedlens.core.federation import Holdings
from fedlens.data import s2
from fedlens.report.partition import GREY, INK, PALE, save, write

Array = np.ndarray[Any, Any]

COLOURS = (
    *("#1f6592", "#d1495b", "#2a9d8f", "#e9a03b", "#7b5ea7", "#5f8a3c", "#c06c9c", "#4aa3c7"),
    *("#9c6644", "#3d5a80", "#b5a52c", "#8c2f39"),
)
LEFT = "#c4c4c4"  # the colour of examples that no client holds
WIDEST = 9.0  # inches


def draw(lat: Array, lon: Array, holdings: Holdings, title: str, path: Path) -> Path:
    """Write the map of examples at `lat`, `lon` [N] degrees, held by S2 cells, as a PNG file.

    A dot is an example and has the colour of its cell; cells cycle through twelve colours.
    Examples that no client holds are grey. The map shows only the area of the examples.
    """
    assert holdings.names is not None, "cells have tokens"
    placed = ~(np.isnan(lat) | np.isnan(lon))
    west, east, south, north = _frame(lat[placed], lon[placed])
    stretch = 1 / max(np.cos(np.radians((south + north) / 2)), 0.2)
    height = min(max(WIDEST * (north - south) * stretch / (east - west), 2.5), WIDEST)
    figure, axes = _panel(height)
    _draw_outlines(axes, holdings.names)

    owner = np.full(len(lat), -1)
    owner[holdings.index.numpy()] = holdings.owners.numpy()
    nobody = placed & (owner < 0)
    held = owner >= 0
    size = float(np.clip(12000 / max(held.sum(), 1), 0.8, 14))
    looks: dict[str, Any] = {"s": size, "linewidths": 0, "zorder": 3, "rasterized": True}
    axes.scatter(lon[nobody], lat[nobody], color=LEFT, **looks)
    order = np.random.default_rng(0).permutation(np.flatnonzero(held))  # so no cell covers others
    colours = np.array(COLOURS)[owner[order] % len(COLOURS)]
    axes.scatter(lon[order], lat[order], c=colours, **looks)

    axes.set_xlim(west, east)
    axes.set_ylim(south, north)
    sizes = holdings.sizes
    subtitle = (
        f"cells {len(holdings):,}   ·   examples {int(sizes.sum()):,}   ·   "
        f"{int(sizes.min()):,} to {int(sizes.max()):,} a cell"
    )
    subtitle += "   ·   a dot is an example, lines bound cells"
    left_out = len(lat) - int(held.sum())
    if left_out:
        subtitle += f"   ·   left out {left_out:,} (grey)"
    write(axes, title, above=28, size=min(14, 105 * WIDEST / max(len(title), 1)), weight="bold")
    write(axes, subtitle, above=10, size=10, color=GREY)
    return save(figure, path)


def _panel(height: float) -> tuple[Figure, Axes]:
    left, right, bottom, above = 0.75, 0.3, 0.6, 0.8
    width, tall = left + WIDEST + right, bottom + height + above
    figure = Figure(figsize=(width, tall), dpi=150, facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.add_axes((left / width, bottom / tall, WIDEST / width, height / tall))
    axes.spines[:].set_color(PALE)
    axes.tick_params(length=0, labelsize=8, labelcolor=GREY)
    axes.set_xlabel("longitude", color=INK, size=9)
    axes.set_ylabel("latitude", color=INK, size=9)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: _compass(x, "E", "W")))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: _compass(y, "N", "S")))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(8, steps=[1, 1.5, 2, 3, 4.5, 5, 6, 9, 10]))
    return figure, axes


def _compass(degrees: float, above: str, below: str) -> str:
    return f"{abs(degrees):g}°{above if degrees > 0 else below if degrees < 0 else ''}"


def _frame(lat: Array, lon: Array) -> tuple[float, float, float, float]:
    """West, east, south and north of the map: all points, and a margin."""
    if not len(lat):
        return -180, 180, -90, 90
    margin = max(0.05 * max(np.ptp(lon), np.ptp(lat)), 0.01)
    return (
        max(float(lon.min()) - margin, -180),
        min(float(lon.max()) + margin, 180),
        max(float(lat.min()) - margin, -90),
        min(float(lat.max()) + margin, 90),
    )


def _draw_outlines(axes: Axes, tokens: tuple[str, ...]) -> None:
    lines = [line for token in tokens for line in _lines(token)]
    axes.add_collection(LineCollection(lines, colors=GREY, linewidths=0.6, alpha=0.7, zorder=2))


def _lines(token: str) -> Iterator[Array]:
    """The border of a cell, split where it crosses 180 degrees of longitude or a pole."""
    lat, lon = s2.outline(token)
    jumps = np.flatnonzero(np.abs(np.diff(lon)) > 90) + 1
    for part in np.split(np.stack([lon, lat], axis=1), jumps):
        if len(part) > 1:
            yield part
