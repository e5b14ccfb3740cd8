"""Figure 8: how FedAvgM depends on its learning rate and momentum."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from fedlens.recipes.hsu2020.cifar import (
    NO_POINT,
    Setting,
    alphas,
    at_point,
    centralised,
    datasets,
    grid,
    momenta,
    rates,
    recipe,
    relative,
)
from fedlens.recipes.page import at_the_end, note
from fedlens.recipes.recipe import Recipe, Results, Scale
from fedlens.report.blocks import Block, Contours, Table
from fedlens.report.numbers import NONE


class Panel(NamedTuple):
    """One row of the paper's figure: a data set, clients a round and local epochs."""

    dataset: str
    goal: int
    epochs: int

    def cell(self, alpha: float, setting: Setting) -> str:
        return f"{self.dataset}, K {self.goal}, E {self.epochs}, α {alpha:g}, {setting}"

    def alphas(self, scale: Scale) -> tuple[float, ...]:
        every = alphas(scale, self.dataset)
        return scale.pick(every, (every[0], every[-1]), every)


def panels(scale: Scale) -> list[Panel]:
    rows = scale.pick(((2, 1),), ((10, 1),), ((20, 1), (10, 1), (5, 1), (5, 5)))
    return [Panel(dataset, *row) for dataset in datasets(scale) for row in rows]


def figure8(scale: Scale) -> Recipe:
    cells = {}
    for dataset, of_dataset in itertools.groupby(panels(scale), lambda panel: panel.dataset):
        cells[f"{dataset}, centralised"] = centralised(scale, dataset)
        for panel in of_dataset:
            for alpha, setting in itertools.product(panel.alphas(scale), grid(scale)):
                cells[panel.cell(alpha, setting)] = at_point(
                    scale, dataset, alpha, setting.point, panel.goal, panel.epochs
                )
    return recipe(scale, "figure8", cells=cells, blocks=blocks, of_diverged=NO_POINT)


@dataclass(frozen=True)
class Grid:
    """The runs of a panel at one α, in a row for each learning rate and a column for each β."""

    results: Results
    panel: Panel
    alpha: float

    @cached_property
    def cells(self) -> list[list[str]]:
        scale = self.results.scale
        return [
            [self.panel.cell(self.alpha, Setting(rate, left)) for left in momenta(scale)]
            for rate in rates(scale)
        ]

    @cached_property
    def relative(self) -> list[list[float | None]]:
        """Accuracies relative to centralised training."""
        dataset = self.panel.dataset
        return [[relative(self.results, dataset, cell) for cell in row] for row in self.cells]

    @property
    def best(self) -> list[float | None]:
        """The best relative accuracy of each learning rate."""
        return [max((y for y in row if y is not None), default=None) for row in self.relative]

    @property
    def num_run(self) -> list[int]:
        """The number of momenta at which each learning rate was run, diverged or not."""
        return [sum(bool(self.results.runs[cell]) for cell in row) for row in self.cells]


def blocks(results: Results) -> list[Block]:
    scale = results.scale
    shown: list[Block] = []
    for panel in panels(scale):
        where = f"{panel.dataset}, K = {panel.goal}, E = {panel.epochs}"
        every = {alpha: Grid(results, panel, alpha) for alpha in panel.alphas(scale)}
        grids = {alpha: one for alpha, one in every.items() if any(map(any, one.relative))}
        if len(grids) > 1:
            shown += _over_alphas(results, grids, where)
        for alpha, one in grids.items():
            # What is hardly a grid is shown with the other α.
            if len(grids) == 1 or min(one.num_run) >= min(2, len(momenta(scale))):
                shown += _of_alpha(results, one, f"{where}, α = {alpha:g}")
    return [*shown, note(__name__, "The grid")]


def _contours(scale: Scale, z: list[list[float | None]], **more: Any) -> Contours:
    """Relative accuracies, in a row for each learning rate."""
    more |= {"y_label": "η_eff", "z_label": "relative accuracy"}
    return Contours(y=rates(scale), z=z, log_y=True, percent=True, **more)


def _of_alpha(results: Results, grid: Grid, where: str) -> list[Block]:
    """A grid as contours and as a table, which also has the best over momenta."""
    scale = results.scale
    scored = [
        (y, cell)
        for row, cells in zip(grid.relative, grid.cells, strict=True)
        for y, cell in zip(row, cells, strict=True)
        if y is not None
    ]
    swing = 100 * results.swing(max(scored, key=lambda found: found[0])[1])
    lefts = [f"{left:.2g}" for left in momenta(scale)]
    ended, rows = [], []
    for rate, names, of_rate, best in zip(
        rates(scale), grid.cells, grid.relative, grid.best, strict=True
    ):
        of_ended = zip(lefts, names, strict=True)
        if broken := [left for left, cell in of_ended if results.diverged(cell) is not None]:
            ended.append(f"η_eff {rate:.2g} with 1 − β {', '.join(broken)}")
        ends = [at_the_end(results, cell) for cell in names]
        over_momenta = (NONE, NONE) if best is None else (ends[of_rate.index(best)], f"{best:.1%}")
        rows.append([f"{rate:.2g}", *ends, *over_momenta])
    return [
        _contours(
            scale,
            grid.relative,
            title=where,
            caption="Relative accuracy over the grid of effective learning rate and momentum, "
            "after the last round. The star is the best single last evaluation, and evaluations "
            "swing: those of the last quarter of its run have a standard deviation of "
            f"{swing:.1f} points. So it need not be the best setting."
            + (f" Runs that diverged have no point: {'; '.join(ended)}." if ended else ""),
            x=momenta(scale),
            x_label="1 − β",
            log_x=True,
        ),
        Table(
            title=f"{where}: accuracy, %",
            header=(
                "η_eff",
                *(f"1 − β = {left}" for left in lefts),
                "best over momenta",
                "relative",
            ),
            rows=rows,
        ),
    ]


def _over_alphas(results: Results, grids: Mapping[float, Grid], where: str) -> list[Block]:
    """A panel of the paper's figure, a table of its accuracies, and one of what it is made of."""
    scale = results.scale
    every, fewer = len(momenta(scale)), []
    for alpha, one in grids.items():
        least, most = min(one.num_run), max(one.num_run)
        if least < every:
            fewer.append(f"α {alpha:g} with {least}" + (f" to {most}" if most > least else ""))
    tried = f"Not run with all {every} momenta: {', '.join(fewer)}." if fewer else ""

    def best(one: Grid, number: int) -> str:
        """The best accuracy of a learning rate; if all of its runs diverged, when the first did."""
        value, cells = one.best[number], one.cells[number]
        run = [place for place, cell in enumerate(cells) if results.runs[cell]]
        if not run:
            return NONE
        place = run[0] if value is None else one.relative[number].index(value)
        return f"{at_the_end(results, cells[place])} at {momenta(scale)[place]:.2g}"

    return [
        _contours(
            scale,
            [list(row) for row in zip(*(one.best for one in grids.values()), strict=True)],
            title=f"{where}: best over momenta",
            caption=tried,
            x=list(range(1, len(grids) + 1)),
            x_names=[f"{alpha:g}" for alpha in grids],
            x_label="α",
        ),
        Table(
            title=f"{where}: best accuracy over momenta, %",
            caption=tried,
            header=("η_eff", *(f"α = {alpha:g}" for alpha in grids)),
            rows=[
                [f"{rate:.2g}", *(best(one, number) for one in grids.values())]
                for number, rate in enumerate(rates(scale))
            ],
        ),
        *([_settings(results, grids, where)] if fewer else []),
    ]


def _settings(results: Results, grids: Mapping[float, Grid], where: str) -> Table:
    """The accuracies of the settings that were run at several α."""
    rows = []
    for setting in grid(results.scale):
        cells = [one.panel.cell(alpha, setting) for alpha, one in grids.items()]
        if sum(bool(results.runs[cell]) for cell in cells) > 1:
            ends = [at_the_end(results, cell) for cell in cells]
            rows.append([f"{setting.rate:.2g}", f"{setting.left:.2g}", *ends])
    return Table(
        title=f"{where}: accuracy of each setting, %",
        header=("η_eff", "1 − β", *(f"α = {alpha:g}" for alpha in grids)),
        rows=rows,
    )
