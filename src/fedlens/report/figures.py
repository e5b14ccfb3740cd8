"""Pictures of runs: curves, bars, and the spread over clients.

Each function draws one picture of all runs, writes it to `path` as PNG, and returns it as SVG
with its words; it returns None, and writes nothing, if the runs recorded nothing to draw.
"""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from fedlens.files import write_atomically
from fedlens.report.records import SPOKEN, Run, decimal, part, percent

INK, SOFT, GRID, PAPER = "#1b1f24", "#5b6470", "#dfe3e8", "#fefefe"
COLOURS = (  # told apart under every common colour blindness by the first four, and by markers
    "#0069b4",
    "#cf6f00",
    "#7b1846",
    "#1a9c82",
    "#cf4fa5",
    "#14245f",
    "#6d5a12",
    "#7c8590",
)
MARKERS = "osD^vPX"  # seven, so that run nine has the first colour with another marker
DASHES: dict[str, Any] = {"test": "-", "validation": (0, (1.2, 1.6)), "train": (0, (4.5, 2.2))}

Say = Callable[[float | None], str]  # a number as it is written

WIDTH, LEFT, RIGHT, TOP, BOTTOM = 4.9, 0.56, 0.58, 0.42, 0.52  # inches
HEIGHT, LINE = 2.35, 0.18  # of the axes, and of one line of a legend
FEW = 6  # runs whose last values still fit in the margin

LOOK = {
    "figure.facecolor": PAPER,
    "axes.facecolor": "none",
    "axes.edgecolor": SOFT,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlepad": 9,
    "axes.labelsize": 9,
    "axes.labelcolor": SOFT,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "text.color": INK,
    "text.parse_math": False,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
    "ytick.major.size": 0,
    "ytick.minor.size": 0,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "legend.handlelength": 2.4,
    "lines.solid_capstyle": "round",
    "svg.fonttype": "none",
    "svg.hashsalt": "fedlens",
}


@dataclass(frozen=True)
class Picture:
    """A figure for a page. Its colours are the page's: `var(--run-0)`, `var(--grid)`, ..."""

    name: str
    caption: str
    alternative: str  # the same in words, for whoever cannot see it
    svg: str


def accuracy(runs: Sequence[Run], path: Path) -> Picture | None:
    """How accuracy grew, round by round."""
    return _curves(runs, "accuracy", percent, path)


def loss(runs: Sequence[Run], path: Path) -> Picture | None:
    """How the loss fell, round by round."""
    return _curves(runs, "loss", decimal, path)


def relative_accuracy(runs: Sequence[Run], path: Path) -> Picture | None:
    """How near each run came to its centralised twin, where it has one."""
    if not any(run.has("relative_accuracy") for run in runs):
        return None
    with _look():
        figure, axes = _sheet(HEIGHT, below=BOTTOM + LINE * len(runs) + 0.1)
        axes.set_title("Relative accuracy", loc="left")
        axes.axhline(1, color=SOFT, linewidth=1.1, linestyle=DASHES["train"])
        words = _draw(figure, axes, runs, "relative_accuracy", percent, "no twin")
        return _finish(
            figure,
            path,
            "Accuracy as a share of that of the run's centralised twin: the same model, trained "
            "for as many examples by one client that holds everything. Dashes: the twin.",
            "Line chart of relative accuracy by round. " + "; ".join(words) + ".",
        )


def final_accuracy(runs: Sequence[Run], path: Path) -> Picture | None:
    """One bar a run, if there are several."""
    spoken, metric = SPOKEN[part(runs)], f"{part(runs)}_accuracy"
    bars = [(i, run, y) for i, run in enumerate(runs) if (y := run.final(metric)) is not None]
    if len(runs) < 2 or not bars:
        return None
    bests = [(run.best(metric) or (y,))[0] for _, run, y in bars]
    top = max(1e-3, *bests, *(y for _, _, y in bars))
    with _look():
        figure, axes = _sheet(0.46 * len(bars), below=0.3, left=0.12)
        axes.set_title(f"Final {spoken} accuracy", loc="left")
        for place, ((i, run, value), best) in enumerate(zip(bars, bests, strict=True)):
            axes.barh(place + 0.18, value, height=0.4, color=_colour(i))
            axes.plot([best, best], [place - 0.02, place + 0.38], color=INK, linewidth=1.4)
            end = best if value < best < value + 0.15 * top else value
            _write(axes, end, place + 0.18, percent(value), right=5, weight="bold")
            _write(axes, 0, place - 0.2, _short(run.name, 55))
        axes.set_ylim(len(bars) - 0.45, -0.5)
        axes.set_xlim(0, top)
        axes.set_yticks([])
        axes.spines["left"].set_visible(False)
        axes.grid(False)
        axes.xaxis.set_major_formatter(FuncFormatter(_percent_tick))
        return _finish(
            figure,
            path,
            f"Accuracy on the {spoken} examples at the end of each run. "
            "The upright stroke marks the best round.",
            f"Bar chart of final {spoken} accuracy. "
            + "; ".join(f"{run.name}: {percent(value)}" for _, run, value in bars)
            + ".",
        )


def clients(runs: Sequence[Run], path: Path) -> Picture | None:
    """How accuracy is spread over clients, where a run recorded it: one panel a run."""
    shown = [(i, run) for i, run in enumerate(runs) if run.has("client_accuracy_median")]
    if not shown:
        return None
    with _look():
        height, gap = (HEIGHT, 0.0) if len(shown) == 1 else (1.25, 0.38)
        total = len(shown) * height + (len(shown) - 1) * gap
        figure = Figure(figsize=(WIDTH, TOP + total + BOTTOM))
        words, panels = [], list[Axes]()
        for place, (i, run) in enumerate(shown):
            bottom = BOTTOM + (len(shown) - 1 - place) * (height + gap)
            first = panels[0] if panels else None
            axes = figure.add_axes(_box(figure, bottom, height), sharex=first, sharey=first)
            panels.append(axes)
            _band(axes, run, _colour(i))
            axes.set_title(f"Accuracy over clients: {_short(run.name, 32)}", loc="left")
            axes.tick_params(labelbottom=place == len(shown) - 1)
        for axes, (i, run) in zip(panels, shown, strict=True):
            ends = [run.final(f"client_accuracy_{m}") for m in ("min", "median", "max")]
            _name_ends(axes, [(y, percent(y), _colour(i)) for y in ends if y is not None])
            low, median, high = map(percent, ends)
            words.append(f"{run.name}: from {low} to {high}, median {median}")
        _rounds_axis(panels[-1], [run for _, run in shown])
        panels[-1].yaxis.set_major_formatter(FuncFormatter(_percent_tick))
        return _finish(
            figure,
            path,
            "Accuracy of the one model on each client's own examples. Line: the median client. "
            "Dashes: the tenth percentile. Band: from the worst client to the best.",
            "Bands of accuracy over clients, by round. At the end, " + "; ".join(words) + ".",
        )


def _curves(runs: Sequence[Run], metric: str, say: Say, path: Path) -> Picture | None:
    judged = part(runs)
    parts = [name for name in DASHES if any(run.has(f"{name}_{metric}") for run in runs)]
    if not parts:
        return None
    solid = judged if judged in parts else parts[0]
    with _look():
        figure, axes = _sheet(HEIGHT, below=BOTTOM + LINE * len(runs) + 0.1)
        axes.set_title(f"{SPOKEN[solid].capitalize()} {metric}", loc="left")
        for name in parts:
            for i, run in enumerate(runs):
                if name != solid:
                    _line(axes, run, f"{name}_{metric}", i, DASHES[name], False)
        words = _draw(figure, axes, runs, f"{solid}_{metric}", say, "not evaluated")
        if len(parts) > 1:
            keys = [Line2D([], [], color=SOFT, linestyle=DASHES[name]) for name in parts]
            spoken = [SPOKEN[name] for name in parts]
            figure.legend(keys, spoken, loc="upper right", ncols=len(parts), labelcolor=SOFT)
        others = " and ".join(SPOKEN[name] for name in parts if name != solid)
        also = f" Broken lines: {others} {metric}." if others else ""
        ends = "; the numbers on the right are the last values" if len(runs) <= FEW else ""
        return _finish(
            figure,
            path,
            f"{metric.capitalize()} on the {SPOKEN[solid]} examples, round by round.{also} "
            f"Rings mark the best round{ends}.",
            f"Line chart of {SPOKEN[solid]} {metric} by round. " + "; ".join(words) + ".",
        )


def _draw(
    figure: Figure, axes: Axes, runs: Sequence[Run], metric: str, say: Say, missing: str
) -> list[str]:
    """One solid line a run, with its last value, axes and legend; the same in words."""
    lasts, words, labels = [], [], []
    for i, run in enumerate(runs):
        _line(axes, run, metric, i, "-", True)
        best = run.best(metric)
        told = f"best {say(best[0])} (round {best[1]})" if best else missing
        stopped = "" if run.status == "finished" else f", {run.status}"
        labels.append(f"{_short(run.name, 58 - len(told + stopped))}: {told}{stopped}")
        rounds, values = _finite(run, metric)
        if values:
            lasts.append((values[-1], say(values[-1]), _colour(i)))
            words.append(
                f"{run.name}: {say(values[0])} in round {rounds[0]}, "
                f"{say(values[-1])} in round {rounds[-1]}, {told}{stopped}"
            )
    _rounds_axis(axes, runs)
    if metric.endswith("accuracy"):
        axes.yaxis.set_major_formatter(FuncFormatter(_percent_tick))
    else:
        _loss_axis(axes)
    if len(runs) <= FEW:
        _name_ends(axes, lasts)
    _legend(figure, labels)
    return words


def _line(axes: Axes, run: Run, metric: str, i: int, dashes: Any, solid: bool) -> None:
    rounds, values = run.curve(metric)
    marker = MARKERS[i % len(MARKERS)] if solid or len(values) == 1 else ""
    axes.plot(
        rounds,
        values,
        color=_colour(i),
        linestyle="-" if solid else dashes,
        linewidth=1.9 if solid else 1.1,
        alpha=1.0 if solid else 0.75,
        marker=marker,
        markersize=4,
        markevery=(min(2 * i, max(0, len(values) - 1)), max(1, len(values) // 6)),
    )
    best = run.best(metric) if solid else None
    if best:
        axes.plot(
            [best[1]],
            [best[0]],
            color=_colour(i),
            marker="o",
            markersize=9,
            markerfacecolor="none",
            markeredgewidth=1.5,
        )


def _band(axes: Axes, run: Run, colour: str) -> None:
    (rounds, low), (same, high) = (run.curve(f"client_accuracy_{m}") for m in ("min", "max"))
    if rounds == same:
        axes.fill_between(rounds, low, high, color=colour, alpha=0.18, linewidth=0)
    rounds, tenth = run.curve("client_accuracy_p10")
    axes.plot(rounds, tenth, color=colour, linewidth=1.1, linestyle=DASHES["train"])
    rounds, median = run.curve("client_accuracy_median")
    axes.plot(rounds, median, color=colour, marker="o" if len(rounds) == 1 else "", markersize=4)


def _finite(run: Run, metric: str) -> tuple[list[int], list[float]]:
    points = [(r, v) for r, v in zip(*run.curve(metric), strict=True) if math.isfinite(v)]
    return [r for r, _ in points], [v for _, v in points]


def _sheet(height: float, below: float, left: float = LEFT) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(WIDTH, TOP + height + below))
    return figure, figure.add_axes(_box(figure, below, height, left))


def _box(
    figure: Figure, bottom: float, height: float, left: float = LEFT
) -> tuple[float, float, float, float]:
    width, tall = figure.get_size_inches()
    return left / width, bottom / tall, (width - left - RIGHT) / width, height / tall


def _rounds_axis(axes: Axes, runs: Sequence[Run]) -> None:
    first = min((run.rounds[0]["round"] for run in runs if run.rounds), default=0)
    last = max(run.num_rounds for run in runs)
    room = max(0.5, 0.02 * (last - first))
    axes.set_xlim(first - room, last + room)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True, steps=[1, 2, 5, 10]))
    axes.set_xlabel("round")


def _loss_axis(axes: Axes) -> None:
    drawn = [y for line in axes.lines for y in np.asarray(line.get_ydata()) if np.isfinite(y)]
    if min(drawn) > 0 and max(drawn) / min(drawn) > 100:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(numticks=6))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    else:
        axes.set_ylim(bottom=min(0.0, *drawn))


def _name_ends(axes: Axes, lasts: Sequence[tuple[float, str, str]]) -> None:
    """The last values in the right margin, pushed apart where they would overlap."""
    axes.autoscale_view()
    low, high = axes.get_window_extent().intervaly
    gap = axes.figure.dpi / 72 * 10.5
    if len(lasts) * gap > high - low + gap:
        return
    ends = sorted((float(axes.transData.transform((0, y))[1]), text, c) for y, text, c in lasts)
    places: list[float] = []
    for height, _, _ in ends:
        places.append(max(height, places[-1] + gap if places else low))
    ceiling = high
    for i in reversed(range(len(places))):
        places[i] = min(places[i], ceiling)
        ceiling = places[i] - gap
    for place, (_, text, colour) in zip(places, ends, strict=True):
        y = (place - low) / (high - low)
        _write(axes, 1, y, text, right=5, xycoords="axes fraction", color=colour, weight="bold")


def _legend(figure: Figure, labels: Sequence[str]) -> None:
    handles = [
        Line2D([], [], color=_colour(i), marker=MARKERS[i % len(MARKERS)], markersize=4)
        for i in range(len(labels))
    ]
    # Named afterwards, since a legend leaves out a label that starts with "_".
    legend = figure.legend(handles, ["."] * len(labels), loc="lower left", borderaxespad=0.3)
    for text, label in zip(legend.get_texts(), labels, strict=True):
        text.set_text(label)


def _write(axes: Axes, x: float, y: float, text: str, right: float = 0, **look: Any) -> None:
    look = {"xycoords": "data", "fontsize": 8.5, "va": "center", "annotation_clip": False, **look}
    axes.annotate(text, (x, y), xytext=(right, 0), textcoords="offset points", **look)


def _percent_tick(value: float, _: Any) -> str:
    return f"{100 * value:.4g}%"


def _colour(i: int) -> str:
    return COLOURS[i % len(COLOURS)]


def _short(name: str, room: int) -> str:
    half = (room - 1) // 2
    return name if len(name) <= room else f"{name[:half]}…{name[-half:]}"


def _look() -> AbstractContextManager[None]:
    context: AbstractContextManager[None] = style.context(LOOK, after_reset=True)
    return context


def _finish(figure: Figure, path: Path, caption: str, alternative: str) -> Picture:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # a name in a script we cannot draw
        png, svg = io.BytesIO(), io.StringIO()
        figure.savefig(png, format="png", dpi=200, metadata={"Software": None})
        figure.savefig(svg, format="svg", transparent=True)
    write_atomically(path, png.getvalue())
    return Picture(path.stem, caption, alternative, _for_page(svg.getvalue(), path.stem))


def _for_page(svg: str, name: str) -> str:
    """An SVG to stand inside HTML: no addresses, ids of its own, colours left to the page."""
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    svg = re.sub(r'<svg [^>]*?(viewBox="[^"]*")[^>]*>', r"<svg \1>", svg, count=1)
    svg = svg.replace("xlink:href", "href")
    svg = re.sub(r' id="([^"]*)"', rf' id="{name}-\1"', svg)
    svg = re.sub(r'(href="|url\()#', rf"\1#{name}-", svg)
    inks = {INK: "var(--ink)", SOFT: "var(--soft)", GRID: "var(--grid)", PAPER: "none"}
    inks |= {colour: f"var(--run-{i})" for i, colour in enumerate(COLOURS)}
    painted = re.compile("|".join(inks))
    return re.sub(
        r'style="[^"]*"', lambda styled: painted.sub(lambda ink: inks[ink[0]], styled[0]), svg
    )
