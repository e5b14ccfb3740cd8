"""Pictures of partitions: who holds how much of which class, and where examples were taken."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.collections import LineCollection
from matplotlib.ticker import FuncFormatter, MaxNLocator

from fedlens.config.experiment import Named
from fedlens.core.federation import Holdings
from fedlens.data import s2
from fedlens.data.partitions import PARTITIONS
from fedlens.report.draw import SOFT, WIDTH, files_of, keep_inside, pictures, print_style, sheet
from fedlens.report.holdings import partition_heat
from fedlens.report.texts import any_script
from fedlens.storage.files import write_atomically

Array = np.ndarray[Any, Any]

COLOURS = (  # of cells
    *("#1f6592", "#d1495b", "#2a9d8f", "#e9a03b", "#7b5ea7", "#5f8a3c", "#c06c9c", "#4aa3c7"),
    *("#9c6644", "#3d5a80", "#b5a52c", "#8c2f39"),
)
LEFT = "#c4c4c4"  # the colour of examples that no client holds


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
    label_counts: Array,  # [K, L]
    classes: Sequence[str],
    title: str,
    path: Path,
    clients: Sequence[str] | None = None,
    sizes: Array | None = None,
) -> Path:
    """Write the heat map of a partition, as a run's page has it, as a PNG file."""
    heat = partition_heat(label_counts, classes, title, clients, sizes)
    write_atomically(path, pictures(heat, ["png"])["png"])
    return path


def draw_map(lat: Array, lon: Array, holdings: Holdings, title: str, path: Path) -> Path:
    """Write the map of examples at `lat`, `lon` [N] degrees, held by S2 cells, as a PNG file.

    A dot is an example and has the colour of its cell; cells cycle through twelve colours, and
    lines bound them. Examples that no client holds are grey. The map shows only the area of the
    examples.
    """
    assert holdings.names is not None, "cells have tokens"
    placed = ~(np.isnan(lat) | np.isnan(lon))
    west, east, south, north = _frame(lat[placed], lon[placed])
    stretch = 1 / max(np.cos(np.radians((south + north) / 2)), 0.2)
    height = min(max(WIDTH * (north - south) * stretch / (east - west), 1.6), WIDTH)
    owner = np.full(len(lat), -1)
    owner[holdings.index.numpy()] = holdings.owners.numpy()
    nobody, held = placed & (owner < 0), owner >= 0
    with print_style(), any_script():
        figure, axes = sheet(title, height, 0.3, left=0.4, right=0.15)
        axes.set(xlim=(west, east), ylim=(south, north))
        axes.grid(False)
        for axis, ends in ((axes.xaxis, "EW"), (axes.yaxis, "NS")):
            axis.set_major_locator(MaxNLocator(6, steps=[1, 1.5, 2, 3, 4.5, 5, 6, 9, 10]))
            axis.set_major_formatter(FuncFormatter(lambda x, _, ends=ends: _compass(x, *ends)))
        lines = [line for token in holdings.names for line in _lines(token)]
        axes.add_collection(LineCollection(lines, colors=SOFT, linewidths=0.4, alpha=0.7, zorder=2))
        size = float(np.clip(4000 / max(held.sum(), 1), 0.4, 6))
        dots: dict[str, Any] = {"s": size, "linewidths": 0, "zorder": 3, "rasterized": True}
        axes.scatter(lon[nobody], lat[nobody], color=LEFT, **dots)
        order = np.random.default_rng(0).permutation(np.flatnonzero(held))  # none covers others
        colours = np.array(COLOURS)[owner[order] % len(COLOURS)]
        axes.scatter(lon[order], lat[order], c=colours, **dots)
        keep_inside(axes)
        write_atomically(path, files_of(figure, ["png"])["png"])
    return path


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
