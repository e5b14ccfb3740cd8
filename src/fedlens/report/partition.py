"""Pictures of partitions: who holds how much of which class, and where examples were taken."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import LineCollection
from matplotlib.colors import LinearSegmentedColormap, PowerNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator, StrMethodFormatter

from fedlens.config.experiment import Named
from fedlens.core.federation import Holdings
from fedlens.data import s2
from fedlens.data.emd import emd
from fedlens.data.partitions import PARTITIONS
from fedlens.report.draw import GRID, INK, SOFT, neighbours, print_style, write
from fedlens.report.holdings import MANY, UNLIKE, by_main_class
from fedlens.report.texts import any_script, find_letters
from fedlens.runs.records import round_numbers
from fedlens.storage.files import write_atomically

Array = np.ndarray[Any, Any]

FEW = 30  # up to this many clients, there is room for their names
LIGHT, BLUE = "#a9cbe0", "#1f6592"
SHADES = LinearSegmentedColormap.from_list("shares", ["white", LIGHT, BLUE, "#08243a"])
COLOURS = (  # of cells
    *("#1f6592", "#d1495b", "#2a9d8f", "#e9a03b", "#7b5ea7", "#5f8a3c", "#c06c9c", "#4aa3c7"),
    *("#9c6644", "#3d5a80", "#b5a52c", "#8c2f39"),
)
LEFT = "#c4c4c4"  # the colour of examples that no client holds
WIDEST = 9.0  # inches


def title_of(dataset: str, partition: Named) -> str:
    """The name of a data set and its partition, with the options that are not defaults."""
    of_round = ", in round 1" if partition.name == "fresh" else ""
    return f"{dataset}: {_words(partition)}{of_round}"


def _words(partition: Named) -> str:
    known = PARTITIONS.options(partition.name)
    words = [partition.name]
    for name, value in partition.options.items():
        if name == "of":
            words.append(f"of {_words(Named.of(value, name))}")
        elif value != known[name].default:
            words.append(f"{name}={Path(value).name if name == 'path' else value}")
    return " ".join(words)


def draw(
    label_counts: Array,
    classes: Sequence[str],
    title: str,
    path: Path,
    clients: Sequence[str] | None = None,
) -> Path:
    """Write the picture of a partition, from its counts [K, L], as a PNG file.

    The area of a bubble is a number of examples. Where there are too many clients for bubbles, they
    are columns of a heat map of class shares, ordered by main class if the clients differ much. A
    panel above shows the sizes of clients. Up to `FEW` clients are labelled with the names
    `clients`, if given.
    """
    num_clients, num_classes = label_counts.shape
    if len(classes) != num_classes:
        raise ValueError(f"{num_classes} classes but {len(classes)} names: give one for each")
    names, called = (
        [name if len(name) <= 24 else f"{name[:23]}…" for name in some or ()]
        for some in (classes, clients if num_clients <= FEW else None)
    )
    distance = emd(label_counts)
    bubbles = max(num_clients, num_classes) <= MANY
    ordered = num_clients > MANY and distance >= UNLIKE
    counts = label_counts[by_main_class(label_counts)] if ordered else label_counts

    cell = 0.42 if max(num_clients, num_classes) <= 12 else 0.27
    width = cell * max(num_clients, 12) if bubbles else 8.5
    height = cell * max(num_classes, 6) if bubbles else min(max(0.26 * num_classes, 2.2), 11)
    left = max(1.0, 0.3 + 0.075 * max(map(len, names)))
    longest = 0.085 * max(map(len, called), default=0)  # inches
    upright = longest > 0.9 * width / num_clients
    below = 0.75 + longest if upright else 0.65
    told = (
        f"clients {num_clients:,}   ·   classes {num_classes:,}   ·   "
        f"examples {label_counts.sum():,}   ·   EMD {distance:.3f}"
    )
    with print_style():
        figure, (main, top) = _panels(
            width, (height, 0.75), (left, 1.5, below, 0.12, 0.85), title, told
        )
        _draw_sizes(top, counts.sum(1))
        _label_axes(main, num_clients, names, called, upright)
        main.set_xlabel("clients, ordered by their main class" if ordered else "clients")
        if bubbles:
            _draw_bubbles(main, counts, diameter=0.92 * 72 * cell)
        else:
            _draw_shares(figure, main, counts)
        return save(figure, path)


def _panels(
    width: float,
    heights: Sequence[float],
    edges: tuple[float, float, float, float, float],
    title: str,
    subtitle: str,
) -> tuple[Figure, list[Axes]]:
    """A figure with panels of these heights above each other, the lowest first, in inches.

    `edges` are what lies left of the panels, right of them, below, between and above.
    """
    left, right, low, gap, above = edges
    total_width = left + width + right
    total_height = low + sum(heights) + gap * (len(heights) - 1) + above
    figure = Figure(figsize=(total_width, total_height), dpi=150)
    FigureCanvasAgg(figure)
    panels = []
    for tall in heights:
        box = left / total_width, low / total_height, width / total_width, tall / total_height
        panels.append(figure.add_axes(box))
        panels[-1].spines[:].set(visible=True, color=GRID)
        panels[-1].grid(False)
        panels[-1].tick_params(which="both", length=0)
        low += tall + gap
    size = min(14, 105 * (width + 1.3) / max(len(title), 1))  # so that it fits
    write(panels[-1], 0, 1, title, xycoords="axes fraction", above=32, fontsize=size, weight="bold")
    write(panels[-1], 0, 1, subtitle, xycoords="axes fraction", above=13, fontsize=10, color=SOFT)
    return figure, panels


def _draw_sizes(axes: Axes, sizes: Array) -> None:
    if len(sizes) <= MANY:
        axes.bar(np.arange(len(sizes)), sizes, width=0.7, color=LIGHT)
    else:
        axes.stairs(*neighbours(sizes), fill=True, color=LIGHT)
    largest = max(int(sizes.max()), 1)
    axes.set(xlim=(-0.5, len(sizes) - 0.5), ylim=(0, 1.05 * largest), ylabel="examples")
    axes.set(xticks=[], yticks=[0, largest], yticklabels=["0", f"{largest:,}"])
    axes.grid(axis="y")
    axes.spines[:].set_visible(False)


def _label_axes(
    axes: Axes, num_clients: int, names: Sequence[str], called: Sequence[str], upright: bool
) -> None:
    shown = range(0, len(names), math.ceil(len(names) / MANY))
    axes.set_yticks(list(shown), [names[label] for label in shown])
    if called:
        axes.set_xticks(range(num_clients), called, rotation=90 if upright else 0)
    else:
        axes.xaxis.set_major_locator(MaxNLocator(12, integer=True, min_n_ticks=1))
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.set(xlim=(-0.5, num_clients - 0.5), ylim=(len(names) - 0.5, -0.5))
    axes.tick_params(labelcolor=INK)


def _draw_bubbles(axes: Axes, counts: Array, diameter: float) -> None:
    """Draw the bubbles; the largest has this diameter in points."""
    client, label = np.nonzero(counts)
    held = counts[client, label]
    most = max(int(held.max(initial=0)), 1)
    axes.set_xticks(np.arange(len(counts)) - 0.5, minor=True)
    axes.set_yticks(np.arange(counts.shape[1]) - 0.5, minor=True)
    axes.grid(which="minor", axis="both")
    areas = np.maximum(diameter**2 * held / most, 1.5)  # a single example stays visible
    axes.scatter(client, label, s=areas, color=BLUE, linewidths=0)
    dot: dict[str, Any] = {"linestyle": "none", "marker": "o", "color": BLUE, "markeredgewidth": 0}
    key = [
        Line2D([], [], markersize=diameter * math.sqrt(n / most), label=f"{n:,}", **dot)
        for n in dict.fromkeys(max(round_numbers(most // part), default=1) for part in (1, 4, 16))
    ]
    axes.legend(
        handles=key,
        title="examples",
        title_fontsize=9,
        loc="upper left",
        bbox_to_anchor=(1, 1),
        alignment="left",
        labelspacing=max(0.6, diameter / 12 - 0.3),
        handlelength=max(1.2, diameter / 9),
    )


def _draw_shares(figure: Figure, axes: Axes, counts: Array) -> None:
    num_clients, num_classes = counts.shape
    shares, _ = neighbours(counts / np.maximum(counts.sum(1, keepdims=True), 1))
    # The darkest shade is at least ten times an equal share: an even partition looks pale.
    darkest = max(float(shares.max()), min(10 / num_classes, 1))
    image = axes.imshow(
        shares.T,
        aspect="auto",
        interpolation="nearest",
        cmap=SHADES,
        norm=PowerNorm(0.5, vmin=0, vmax=darkest),
        extent=(-0.5, num_clients - 0.5, num_classes - 0.5, -0.5),
    )
    column = axes.inset_axes((1.015, 0.0, 0.018, 1.0))
    percent = FuncFormatter(lambda share, _: f"{100 * share:.3g}%")
    key = figure.colorbar(image, cax=column, format=percent)
    key.set_label("share of the client's examples")
    key.outline.set_color(GRID)


def save(figure: Figure, path: Path) -> Path:
    """Write a figure as a PNG file."""
    png = io.BytesIO()
    with any_script():
        find_letters(figure)
        figure.savefig(png, format="png")
    write_atomically(path, png.getvalue())
    return path


def draw_map(lat: Array, lon: Array, holdings: Holdings, title: str, path: Path) -> Path:
    """Write the map of examples at `lat`, `lon` [N] degrees, held by S2 cells, as a PNG file.

    A dot is an example and has the colour of its cell; cells cycle through twelve colours.
    Examples that no client holds are grey. The map shows only the area of the examples.
    """
    assert holdings.names is not None, "cells have tokens"
    placed = ~(np.isnan(lat) | np.isnan(lon))
    west, east, south, north = _frame(lat[placed], lon[placed])
    stretch = 1 / max(np.cos(np.radians((south + north) / 2)), 0.2)
    height = min(max(WIDEST * (north - south) * stretch / (east - west), 2.5), WIDEST)
    owner = np.full(len(lat), -1)
    owner[holdings.index.numpy()] = holdings.owners.numpy()
    nobody, held = placed & (owner < 0), owner >= 0
    sizes, left_out = holdings.sizes, len(lat) - int(held.sum())
    told = (
        f"cells {len(holdings):,}   ·   examples {int(sizes.sum()):,}   ·   "
        f"{int(sizes.min()):,} to {int(sizes.max()):,} a cell   ·   "
        "a dot is an example, lines bound cells"
    )
    told += f"   ·   left out {left_out:,} (grey)" if left_out else ""
    with print_style():
        figure, (axes,) = _panels(WIDEST, [height], (0.75, 0.3, 0.6, 0.0, 0.8), title, told)
        axes.set(xlabel="longitude", ylabel="latitude", xlim=(west, east), ylim=(south, north))
        for axis, ends in ((axes.xaxis, "EW"), (axes.yaxis, "NS")):
            axis.set_major_locator(MaxNLocator(8, steps=[1, 1.5, 2, 3, 4.5, 5, 6, 9, 10]))
            axis.set_major_formatter(FuncFormatter(lambda x, _, ends=ends: _compass(x, *ends)))
        lines = [line for token in holdings.names for line in _lines(token)]
        axes.add_collection(LineCollection(lines, colors=SOFT, linewidths=0.6, alpha=0.7, zorder=2))
        size = float(np.clip(12000 / max(held.sum(), 1), 0.8, 14))
        dots: dict[str, Any] = {"s": size, "linewidths": 0, "zorder": 3, "rasterized": True}
        axes.scatter(lon[nobody], lat[nobody], color=LEFT, **dots)
        order = np.random.default_rng(0).permutation(np.flatnonzero(held))  # none covers others
        colours = np.array(COLOURS)[owner[order] % len(COLOURS)]
        axes.scatter(lon[order], lat[order], c=colours, **dots)
        return save(figure, path)


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


def _lines(token: str) -> Iterator[Array]:
    """The border of a cell, split where it crosses 180 degrees of longitude or a pole."""
    lat, lon = s2.outline(token)
    jumps = np.flatnonzero(np.abs(np.diff(lon)) > 90) + 1
    for part in np.split(np.stack([lon, lat], axis=1), jumps):
        if len(part) > 1:
            yield part
