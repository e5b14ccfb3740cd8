"""Figure 8: how FedAvgM depends on its learning rate and momentum."""

from __future__ import annotations

from typing import NamedTuple

from fedlens.config.experiment import Named
from fedlens.recipes.hsu2020.cifar import (
    NO_POINT,
    alphas,
    centralised,
    datasets,
    experiment,
    lasting,
    stand_in,
)
from fedlens.recipes.page import at_the_end
from fedlens.recipes.recipe import Recipe, Results, Scale
from fedlens.report.blocks import Block, Contours, Table, Text
from fedlens.report.numbers import NONE


class Panel(NamedTuple):
    """One row of the paper's figure: clients a round and local epochs."""

    goal: int
    epochs: int


def panels(scale: Scale) -> tuple[Panel, ...]:
    whole = (Panel(20, 1), Panel(10, 1), Panel(5, 1), Panel(5, 5))
    return scale.pick((Panel(2, 1),), (Panel(10, 1),), whole)


def rates(scale: Scale) -> tuple[float, ...]:
    """The effective learning rates η / (1 − β)."""
    return scale.pick((0.01, 0.1), (0.01, 0.1, 1.0), tuple(10 ** (-3 + i / 2) for i in range(7)))


def momenta(scale: Scale) -> tuple[float, ...]:
    """The values of 1 − β."""
    return scale.pick((0.1, 1.0), (0.1, 0.3, 1.0), tuple(10 ** (-2.5 + i / 2) for i in range(6)))


def figure8(scale: Scale) -> Recipe:
    cells = {}
    for dataset in datasets(scale):
        cells[f"{dataset}, centralised"] = centralised(scale, dataset)
        for panel in panels(scale):
            for alpha in _alphas(scale, dataset):
                for rate in rates(scale):
                    for left in momenta(scale):
                        cells[_name(dataset, panel, alpha, rate, left)] = experiment(
                            scale,
                            dataset,
                            alpha,
                            (Named("fedavgm", {"momentum": 1 - left}),),
                            panel.goal,
                            lr=rate * left,
                            epochs=panel.epochs,
                        )
    return Recipe(
        title="Sensitivity to learning rate and momentum",
        about="Relative accuracy of FedAvgM over a grid of effective learning rates η_eff = η / "
        "(1 − β) and momenta, for several concentrations α, report goals K and local epochs E. "
        "The paper finds that the good region shrinks as clients become less alike, and that "
        "η_eff = 0.01 works well in many situations.",
        cells=cells,
        blocks=blocks,
        stand_in=stand_in(scale),
        of_diverged=NO_POINT,
    )


def _alphas(scale: Scale, dataset: str) -> tuple[float, ...]:
    every = alphas(scale, dataset)
    return scale.pick(every, (every[0], every[-1]), every)


def _name(dataset: str, panel: Panel, alpha: float, rate: float, left: float) -> str:
    where = f"{dataset}, K {panel.goal}, E {panel.epochs}, α {alpha:g}"
    return f"{where}, η_eff {rate:.2g}, 1-β {left:.2g}"


def blocks(results: Results) -> list[Block]:
    scale = results.scale
    num_momenta = len(momenta(scale))
    shown: list[Block] = []
    for dataset in datasets(scale):
        for panel in panels(scale):
            grids = {a: _grid(results, dataset, panel, a) for a in _alphas(scale, dataset)}
            found = {a: grid for a, grid in grids.items() if any(map(any, grid))}
            where = f"{dataset}, K = {panel.goal}, E = {panel.epochs}"
            cells = {
                alpha: [
                    [_name(dataset, panel, alpha, rate, left) for left in momenta(scale)]
                    for rate in rates(scale)
                ]
                for alpha in found
            }
            if len(found) > 1:
                shown += _over_alphas(results, cells, found, where)
            for alpha, grid in found.items():
                if len(found) > 1 and min(_num_run(results, cells[alpha])) < min(2, num_momenta):
                    continue  # hardly a grid: its runs are shown with those of the other α
                shown += [
                    Contours(
                        title=f"{where}, α = {alpha:g}",
                        caption="Relative accuracy over the grid of effective learning rate and "
                        "momentum, after the last round."
                        f"{_star(results, cells[alpha])}"
                        f"{_left_out(results, dataset, panel, alpha)}",
                        x=momenta(scale),
                        y=rates(scale),
                        z=grid,
                        x_label="1 − β",
                        y_label="η_eff",
                        z_label="relative accuracy",
                        log_x=True,
                        log_y=True,
                        percent=True,
                    ),
                    _table(
                        results, cells[alpha], grid, title=f"{where}, α = {alpha:g}: accuracy, %"
                    ),
                ]
    return [
        *shown,
        Text(
            title="The grid",
            paragraphs=(
                "The paper's grid is 7 effective learning rates, 0.001 to 1, times 6 momenta, 1 − "
                "β from 0.0032 to 1, for each of 8 concentrations and 4 pairs of K and E: 1,344 "
                "runs a data set. A run that diverged has no point, however good it was before.",
                "The four rows are ours. The text says that there are several report goals K out "
                "of 100 clients and that the last two rows compare local epochs; it does not print "
                "the K and E of any row. We take K = 20, 10 and 5 with one local epoch, and 5 with "
                "five.",
            ),
        ),
    ]


def _grid(results: Results, dataset: str, panel: Panel, alpha: float) -> list[list[float | None]]:
    """Relative accuracies, one row per effective learning rate."""
    whole = results.final(f"{dataset}, centralised")
    grid = []
    for rate in rates(results.scale):
        row = []
        for left in momenta(results.scale):
            found = lasting(results, _name(dataset, panel, alpha, rate, left))
            row.append(found.mean / whole.mean if found and whole and whole.mean else None)
        grid.append(row)
    return grid


Cells = list[list[str]]
"""The names of the cells of one α, one row per effective learning rate."""


def _num_run(results: Results, cells: Cells) -> list[int]:
    """The number of momenta at which each effective learning rate was run, diverged or not."""
    return [sum(bool(results.runs[cell]) for cell in row) for row in cells]


def _over_alphas(
    results: Results,
    cells: dict[float, Cells],
    grids: dict[float, list[list[float | None]]],
    where: str,
) -> list[Block]:
    """A panel of the paper's figure, a table of its accuracies, and one of what it is made of."""
    scale = results.scale
    every, fewer = len(momenta(scale)), []
    for alpha, names in cells.items():
        least, most = min(run := _num_run(results, names)), max(run)
        if least < every:
            fewer.append(f"α {alpha:g} with {least}" + (f" to {most}" if most > least else ""))
    tried = f" Not run with all {every} momenta: {', '.join(fewer)}." if fewer else ""
    rows = []
    for number, rate in enumerate(rates(scale)):
        row = [f"{rate:.2g}"]
        for alpha, grid in grids.items():
            best, of_rate = _best(grid[number]), cells[alpha][number]
            run = [place for place, cell in enumerate(of_rate) if results.runs[cell]]
            # If all runs of a rate diverged, the first of them says when.
            place = run[0] if run and best is None else grid[number].index(best) if run else None
            row.append(
                NONE
                if place is None
                else f"{at_the_end(results, of_rate[place])} at {momenta(scale)[place]:.2g}"
            )
        rows.append(row)
    return [
        Contours(
            title=f"{where}: best over momenta",
            caption="As the paper draws it: at each α and effective learning rate the best "
            "relative accuracy over all momenta whose runs did not diverge. Clients are less alike "
            f"to the right.{tried}",
            x=list(range(1, len(grids) + 1)),
            y=rates(scale),
            z=[[_best(grids[a][i]) for a in grids] for i in range(len(rates(scale)))],
            x_names=[f"{a:g}" for a in grids],
            x_label="α",
            y_label="η_eff",
            z_label="relative accuracy",
            log_y=True,
            percent=True,
        ),
        Table(
            title=f"{where}: best accuracy over momenta, %",
            caption="Test accuracy after the last round, at the 1 − β that it was reached with."
            f"{tried}",
            header=("η_eff", *(f"α = {a:g}" for a in grids)),
            rows=rows,
        ),
        *([_settings(results, cells, where)] if fewer else []),
    ]


def _settings(results: Results, cells: dict[float, Cells], where: str) -> Table:
    """The accuracies of the settings that were run at several α."""
    scale = results.scale
    rows = []
    for number, rate in enumerate(rates(scale)):
        for place, left in enumerate(momenta(scale)):
            of_setting = [names[number][place] for names in cells.values()]
            if sum(bool(results.runs[cell]) for cell in of_setting) > 1:
                ends = [at_the_end(results, cell) for cell in of_setting]
                rows.append([f"{rate:.2g}", f"{left:.2g}", *ends])
    return Table(
        title=f"{where}: accuracy of each setting, %",
        caption="Test accuracy after the last round, for the settings that were run at two α or "
        "more: what one setting gives as clients become less alike.",
        header=("η_eff", "1 − β", *(f"α = {a:g}" for a in cells)),
        rows=rows,
    )


def _star(results: Results, cells: Cells) -> str:
    """Sentences that explain the star in a grid of cells."""
    ends = {cell: end.mean for row in cells for cell in row if (end := lasting(results, cell))}
    swing = 100 * results.swing(max(ends, key=ends.__getitem__))
    return (
        " The star is the best single last evaluation, and evaluations swing: those of the last "
        f"quarter of its run have a standard deviation of {swing:.1f} points. So it need not be "
        "the best setting."
    )


def _table(results: Results, cells: Cells, grid: list[list[float | None]], *, title: str) -> Table:
    """The accuracies of a grid and, as in the paper's figure, the best over momenta."""
    rows = []
    for rate, of_rate, relative in zip(rates(results.scale), cells, grid, strict=True):
        best = _best(relative)
        ends = [at_the_end(results, cell) for cell in of_rate]
        rows.append(
            [
                f"{rate:.2g}",
                *ends,
                *((NONE, NONE) if best is None else (ends[relative.index(best)], f"{best:.1%}")),
            ]
        )
    return Table(
        title=title,
        caption="Test accuracy after the last round. The paper's figure has the best over all "
        "momenta at each α, relative to centralised training: the last column is its column of "
        "this α.",
        header=(
            "η_eff",
            *(f"1 − β = {left:.2g}" for left in momenta(results.scale)),
            *("best over momenta", "relative"),
        ),
        rows=rows,
    )


def _left_out(results: Results, dataset: str, panel: Panel, alpha: float) -> str:
    """A sentence about where runs diverged."""
    where = []
    for rate in rates(results.scale):
        lefts = [
            f"{left:.2g}"
            for left in momenta(results.scale)
            if results.diverged(_name(dataset, panel, alpha, rate, left)) is not None
        ]
        if lefts:
            where.append(f"η_eff {rate:.2g} with 1 − β {', '.join(lefts)}")
    return f" Runs that diverged have no point: {'; '.join(where)}." if where else ""


def _best(row: list[float | None]) -> float | None:
    return max((value for value in row if value is not None), default=None)
