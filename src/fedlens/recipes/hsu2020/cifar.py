"""The paper's experiments on CIFAR-10 and CIFAR-100: Figure 4, its pilot, and Figure 8.

Clients are synthetic, by a Dirichlet prior. Figure 4 and centralised training have the settings
that the pilot picked: those in chosen.json, beside this file.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple, TypeVar

import torch

from fedlens.config.experiment import Clients, Evaluate, Experiment, LocalTraining, Named
from fedlens.data.augment import Augment
from fedlens.data.emd import emd_per_client
from fedlens.recipes.hsu2020.setting import BASES, PUBLISHED, relative_curves
from fedlens.recipes.page import at_the_end, beside, note, recipe, sentences
from fedlens.recipes.recipe import Recipe, Results, Scale
from fedlens.report.blocks import Block, Contours, Curves, Heat, Line, Strip, Table
from fedlens.report.numbers import NONE
from fedlens.runs.records import Run

T = TypeVar("T")
Axes = tuple[str, float, str, int]
"""Of Figure 4: a data set, a concentration, FedAvg or FedAvgM, and the clients a round."""

ALPHAS = {
    "cifar10": (100.0, 10.0, 1.0, 0.5, 0.2, 0.1, 0.05, 0.0),
    "cifar100": (1000.0, 100.0, 10.0, 5.0, 2.0, 1.0, 0.5, 0.0),
}
ROUNDS = {"cifar10": 10_000, "cifar100": 20_000}
EPOCHS = 100  # of centralised training: our choice, see notes.md
NO_POINT = "Such a run has no point in the figure."  # a run that diverged
CHOSEN = "chosen.json"
CENTRALISED = "centralised"  # the key there of the choice for centralised training


def published_emd(dataset: str, alpha: float) -> float | None:
    """The weighted mean EMD of the splits that the authors released."""
    emd: dict[str, float] = PUBLISHED[dataset]["emd"]
    return emd.get(f"{alpha:g}")


class Point(NamedTuple):
    """The clients' learning rate and the server's momentum."""

    lr: float
    momentum: float


class Rate(NamedTuple):
    """The learning rate of centralised training, and its schedule: constant, or cosine to 0."""

    lr: float
    schedule: str = "constant"


class Setting(NamedTuple):
    """A point of Figure 8's grid: an effective learning rate η / (1 − β), and 1 − β."""

    rate: float
    left: float

    def __str__(self) -> str:
        return f"η_eff {self.rate:.2g}, 1-β {self.left:.2g}"

    @property
    def point(self) -> Point:
        return Point(self.rate * self.left, 1 - self.left)


def rates(scale: Scale) -> tuple[float, ...]:
    """The effective learning rates η / (1 − β) of the grid."""
    return scale.pick((0.01, 0.1), (0.01, 0.1, 1.0), tuple(10 ** (-3 + i / 2) for i in range(7)))


def momenta(scale: Scale) -> tuple[float, ...]:
    """The values of 1 − β of the grid."""
    return scale.pick((0.1, 1.0), (0.1, 0.3, 1.0), tuple(10 ** (-2.5 + i / 2) for i in range(6)))


def grid(scale: Scale) -> list[Setting]:
    """The grid of Figure 8, by learning rate and then by momentum."""
    return list(itertools.starmap(Setting, itertools.product(rates(scale), momenta(scale))))


@cache
def _chosen() -> dict[str, dict[str, Any]]:
    found: dict[str, Any] = json.loads((files(__package__) / CHOSEN).read_text(encoding="utf-8"))
    return found


def chosen(*keys: str) -> Any:
    """The pilot's choice for a data set, an α and a base, or for centralised training; or none."""
    found: Any = _chosen()
    for key in keys:
        found = found.get(key, {})
    return found


def alphas(scale: Scale, dataset: str) -> tuple[float, ...]:
    """The concentrations at this scale: all, or some from equal clients to one class each."""
    every = ALPHAS[dataset]
    return scale.pick((every[0], 0.0), (every[0], every[2], 0.0), every)


def datasets(scale: Scale) -> tuple[str, ...]:
    """CIFAR-10 and, at the paper's scale and if it is available, CIFAR-100."""
    both = scale.name == "paper" and scale.has("cifar100")
    return ("cifar10", "cifar100") if both else ("cifar10",)


def experiment(
    scale: Scale,
    dataset: str,
    alpha: float,
    algorithm: Sequence[Named] = (),
    per_round: int = 10,
    *,
    lr: float | None = None,
    epochs: int = 1,
) -> Experiment:
    """100 clients of 500 images, whose classes are drawn with concentration α.

    The default `lr` is the paper's, 0.01, or five times that at smaller scales.
    """
    return scale.experiment(
        dataset,
        ("linear", "simple-cnn", "hsu-cnn"),
        (2, 40, ROUNDS[dataset]),
        augment=scale.pick(Augment(), Augment(), Augment(crop=4, flip=True)),
        clients=Clients(
            count=scale.pick(20, 100, 100),
            per_round=min(per_round, scale.pick(2, 10, per_round)),
            partition=Named("dirichlet", {"alpha": alpha}),
        ),
        local=LocalTraining(
            epochs=epochs,
            batch_size=scale.pick(64, 32, 64),
            lr=lr or scale.pick(0.05, 0.05, 0.01),
            weight_decay=4e-4,
        ),
        evaluate=Evaluate(every=scale.pick(1, 5, 100)),
        algorithm=tuple(algorithm),
    )


def at_point(
    scale: Scale, dataset: str, alpha: float, point: Point, per_round: int, epochs: int = 1
) -> Experiment:
    """FedAvgM with this learning rate and momentum."""
    server = Named("fedavgm", {"momentum": point.momentum})
    return experiment(scale, dataset, alpha, (server,), per_round, lr=point.lr, epochs=epochs)


def centralised(scale: Scale, dataset: str, rate: Rate | None = None) -> Experiment:
    """One client that holds all examples; a round is an epoch.

    The default `rate` is the choice of Figure 4's pilot, if any, else the clients' default.
    """
    alone = experiment(scale, dataset, 0.0)
    if rate is None and scale.name == "paper" and (found := chosen(dataset, CENTRALISED)):
        rate = Rate(*found)
    lr = alone.local.lr if rate is None else rate.lr
    if rate is not None and rate.schedule != "constant":
        lr = Named(rate.schedule, {"start": rate.lr})
    return replace(
        alone,
        rounds=scale.pick(1, 8, EPOCHS),
        clients=Clients(count=1, partition=Named("iid")),
        local=replace(alone.local, lr=lr, reset=False),
        evaluate=Evaluate(every=1),
    )


def relative(results: Results, dataset: str, cell: str) -> float | None:
    """A cell's final accuracy divided by that of centralised training, if both were run.

    None if a run of the cell diverged: its accuracy before that does not count for its settings.
    """
    ends, whole = results.final(cell), results.final(f"{dataset}, centralised")
    if results.diverged(cell) is not None or not ends or not whole or not whole.mean:
        return None
    return ends.mean / whole.mean


def said(scale: Scale) -> dict[str, Any]:
    """What the page of an item says of its data, for `page.recipe`."""
    also = []
    if scale.name == "paper":
        if "cifar100" not in datasets(scale):
            where = "among these records" if scale.recorded else "on this machine"
            also.append(f"CIFAR-100 is left out: it is not {where}.")
        also.append(sentences(__name__, "Augmentation"))
    return {"on": ["cifar10"], "small": sentences(__name__, "Small"), "also": also}


def report_goals(scale: Scale) -> tuple[int, ...]:
    return scale.pick((2,), (10,), (5, 10, 20, 40))


def figure4(scale: Scale) -> Recipe:
    """Figure 4: relative accuracy against how unalike clients are, on CIFAR-10 and CIFAR-100."""
    cells, names = {}, dict[Axes, str]()
    for dataset in datasets(scale):
        cells[f"{dataset}, centralised"] = centralised(scale, dataset)
        axes = [dataset], alphas(scale, dataset), BASES, report_goals(scale)
        for _, alpha, base, k in itertools.product(*axes):
            rule, lr = BASES[base], None
            picked = chosen(dataset, f"{alpha:g}", base)
            if picked and scale.name == "paper":
                lr, momentum = picked
                rule = (Named("fedavgm", {"momentum": momentum}),) if momentum else ()
            # Where the pilot picked no momentum for FedAvgM, it is FedAvg, and both are one run.
            cell = f"{dataset}, α {alpha:g}, {base if rule else 'FedAvg'}, K {k}"
            names[dataset, alpha, base, k] = cell
            cells[cell] = experiment(scale, dataset, alpha, rule, k, lr=lr)

    def blocks(results: Results) -> list[Block]:
        return _figure4(results, names)

    more = {"cells": cells, "of_diverged": NO_POINT, **said(scale)}
    return recipe(__name__, scale, "figure4", blocks, **more)


def _figure4(results: Results, names: Mapping[Axes, str]) -> list[Block]:
    shown: list[Block] = []
    for dataset in datasets(results.scale):
        runs: dict[float, Run] = {}  # any at each concentration: all have the same clients
        for (of, alpha, *_), cell in names.items():
            for run in results.runs[cell] if of == dataset else ():
                runs.setdefault(alpha, run)
        if not runs:
            continue
        emds = {a: run.summary["emd"] for a, run in runs.items()}
        label_counts = {a: (run.partition or {})["label_counts"] for a, run in runs.items()}
        shown += [
            _curves(results, dataset, emds, names),
            Strip(
                title=f"{dataset}: how unalike clients are",
                groups=[
                    (f"α {a:g}", emd_per_client(torch.tensor(counts)).tolist())
                    for a, counts in label_counts.items()
                ],
                marks=[*emds.values()],
                mark="weighted mean",
                x_label="EMD",
            ),
            beside(
                [(f"α {a:g}", published_emd(dataset, a), emd) for a, emd in emds.items()],
                title=f"{dataset}: mean EMD",
                of="concentration",
                percent=False,
                digits=3,
            ),
            beside(
                [
                    (
                        dataset,
                        PUBLISHED[dataset]["centralised"],
                        results.final(f"{dataset}, centralised"),
                    )
                ],
                title=f"{dataset}: centralised accuracy, %",
            ),
        ]
    return [*shown, note(__name__, "What the paper finds")]


def _curves(
    results: Results, dataset: str, emds: dict[float, float], names: Mapping[Axes, str]
) -> Curves:
    lines = []
    for base, k in itertools.product(BASES, report_goals(results.scale)):
        every = {a: names[dataset, a, base, k] for a in emds}
        cells = {a: cell for a, cell in every.items() if f", {base}, " in cell}
        if any(results.runs[cell] for cell in cells.values()):
            y = [relative(results, dataset, cell) for cell in cells.values()]
            ended = [f"{a:g}" for a, cell in cells.items() if results.diverged(cell) is not None]
            ends = f"diverged at α {', '.join(ended)}" if ended else ""
            lines.append(Line(f"{base}, K {k}", [emds[a] for a in cells], y, note=ends))
    picked = chosen(dataset, CENTRALISED)
    rate = "the rate that the pilot picked" if picked else "the clients' default rate"
    return relative_curves(
        lines,
        title=f"{dataset}: relative accuracy",
        caption="Test accuracy after the last round, divided by that of centralised training, "
        f"which has {rate}. FedAvgM has points only where it has momentum: where the pilot picked "
        "none for it, it is FedAvg, and both are one run. Runs that diverged have no point, "
        "however good they were before: the names of the lines say at which α.",
        x_label="mean EMD",
    )


GOAL = 10  # clients a round
SEED = 0  # of the split, so that all runs have the same validation images
MEASURE = "validation_accuracy"
STRONG = 0.05  # with a smaller 1 − β, momentum starts slowly: a tenth of the rounds misjudges it
# Learning rates whose full run without momentum diverged in Figure 4. (At α = 1 a rate of 0.1 did
# not diverge there, but did in Figure 8.)
DIVERGED = {
    "cifar10": {10.0: (0.1,), 0.05: (0.1,), 0.0: (0.1,)},
    "cifar100": {10.0: (0.1,)},
}
SCHEDULES = ("constant", "cosine")  # of centralised training


def figure4_pilot(scale: Scale) -> Recipe:
    """The pilot of Figure 4: which learning rate and momentum, at every concentration.

    The paper reports the best of a grid, and does not say by which images it is the best. Here a
    tenth of the training images is set apart, and runs over Figure 8's grid are judged by them
    alone. Most are short. What they pick goes into chosen.json, beside this file, which Figure 4
    reads.
    """
    cells = {}
    for dataset in datasets(scale):
        for alpha, setting in itertools.product(alphas(scale, dataset), grid(scale)):
            whole = at_point(scale, dataset, alpha, setting.point, GOAL)
            short = whole.rounds if setting.left < STRONG else whole.rounds // 10
            cells[_pilot_cell(dataset, alpha, setting)] = _judged(
                replace(whole, rounds=scale.pick(2, 20, short))
            )
    for dataset in datasets(scale):
        for rate in _rates(scale):
            cells[_alone(dataset, rate)] = _judged(centralised(scale, dataset, rate))
    more = {"cells": cells, "seeds": (1, 1, 1), "ours": True, **said(scale)}
    return recipe(__name__, scale, "figure4-pilot", _pilot, **more)


def _judged(whole: Experiment) -> Experiment:
    """The experiment evaluated on held-out validation images, the same in all runs."""
    return replace(
        whole,
        clients=replace(whole.clients, seed=SEED),
        evaluate=Evaluate(every=whole.rounds, on=("validation",)),
    )


def _pilot_cell(dataset: str, alpha: float, setting: Setting) -> str:
    return f"{dataset}, α {alpha:g}, {setting}"


def _alone(dataset: str, rate: Rate) -> str:
    return f"{dataset}, centralised, lr {rate.lr:.2g}, {rate.schedule}"


def _rates(scale: Scale) -> list[Rate]:
    return [Rate(lr, how) for how, lr in itertools.product(SCHEDULES, rates(scale))]


def _best(results: Results, cells: Mapping[T, str]) -> T | None:
    """Of what has a cell, that with the best accuracy on the images set apart."""
    measured = {key: results.final(cell, MEASURE) for key, cell in cells.items()}
    found = {key: one.mean for key, one in measured.items() if one}
    return max(found, key=lambda key: found[key], default=None)


def best(results: Results) -> dict[str, dict[str, Any]]:
    """The content of chosen.json: the best points by data set, α and base, and the best rates."""
    scale = results.scale
    picked: dict[str, dict[str, Any]] = {dataset: {} for dataset in datasets(scale)}
    for dataset, found in picked.items():
        diverged = DIVERGED[dataset] if scale.name == "paper" else {}
        for alpha, base in itertools.product(alphas(scale, dataset), BASES):
            cells = {
                setting.point: _pilot_cell(dataset, alpha, setting)
                for setting in grid(scale)
                if base != "FedAvg" or setting.left == 1
                if setting.left < 1 or setting.rate not in diverged.get(alpha, ())
            }
            if point := _best(results, cells):
                found.setdefault(f"{alpha:g}", {})[base] = point
        if rate := _best(results, {rate: _alone(dataset, rate) for rate in _rates(scale)}):
            found[CENTRALISED] = rate
    return {dataset: found for dataset, found in picked.items() if found}


def _pilot(results: Results) -> list[Block]:
    picked = best(results)
    rows = [
        [dataset, alpha, base, f"{point.lr:.3g}", f"{point.momentum:.3g}"]
        for dataset, by_alpha in picked.items()
        for alpha, by_base in by_alpha.items()
        if alpha != CENTRALISED
        for base, point in by_base.items()
    ]
    header = ("data", "α", "method", "learning rate", "server momentum")
    return [
        Table(title="What the pilot picks", header=header, rows=rows),
        *(_grid(results, name) for name, found in picked.items() if found.keys() - {CENTRALISED}),
        *(
            Table(
                title=f"{dataset}: centralised training",
                header=("schedule", "learning rate", "validation accuracy, %", ""),
                rows=[
                    [
                        one.schedule,
                        f"{one.lr:.2g}",
                        f"{100 * end.mean:.2f}",
                        "picked" * (one == rate),
                    ]
                    for one in _rates(results.scale)
                    if (end := results.final(_alone(dataset, one), MEASURE))
                ],
            )
            for dataset, found in picked.items()
            if (rate := found.get(CENTRALISED))
        ),
        replace(note(__name__, "For Figure 4"), code=json.dumps(picked, indent=1)),
    ]


def _grid(results: Results, dataset: str) -> Heat:
    """A picture per data set of all points that were run, at every concentration."""
    scale = results.scale
    rows = alphas(scale, dataset)
    settings = [
        Setting(rate, left)
        for left in momenta(scale)
        for rate in rates(scale)
        if any(_pilot_cell(dataset, a, Setting(rate, left)) in results.runs for a in rows)
    ]
    values = [
        [(end := results.final(_pilot_cell(dataset, a, s), MEASURE)) and end.mean for s in settings]
        for a in rows
    ]
    best_of = {
        (i, row.index(max(scored)))
        for i, row in enumerate(values)
        if (scored := [y for y in row if y is not None])
    }
    return Heat(
        title=f"{dataset}: validation accuracy",
        values=values,
        row_names=[f"α {alpha:g}" for alpha in rows],
        column_names=[f"η_eff {s.rate:.2g}, 1−β {s.left:.2g}" for s in settings],
        value_label="validation accuracy",
        percent=True,
        best=frozenset(best_of),
    )


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
    """Figure 8: relative accuracy by effective learning rate, momentum and α."""
    cells = {}
    for dataset, of_dataset in itertools.groupby(panels(scale), lambda panel: panel.dataset):
        cells[f"{dataset}, centralised"] = centralised(scale, dataset)
        for panel in of_dataset:
            for alpha, setting in itertools.product(panel.alphas(scale), grid(scale)):
                cells[panel.cell(alpha, setting)] = at_point(
                    scale, dataset, alpha, setting.point, panel.goal, panel.epochs
                )
    more = {"cells": cells, "seeds": (1, 1, 1), "of_diverged": NO_POINT, **said(scale)}
    return recipe(__name__, scale, "figure8", _figure8, **more)


class Row(NamedTuple):
    """The runs of a panel at one α with one learning rate: a cell for each momentum."""

    cells: list[str]
    relative: list[float | None]  # accuracies, to centralised training
    num_run: int  # diverged or not

    @property
    def best(self) -> float | None:
        return max((y for y in self.relative if y is not None), default=None)


Grid = list[Row]
"""A row for each learning rate."""


def _figure8(results: Results) -> list[Block]:
    scale = results.scale
    shown: list[Block] = []
    for panel in panels(scale):
        where = f"{panel.dataset}, K = {panel.goal}, E = {panel.epochs}"
        grids: dict[float, Grid] = {}
        for alpha in panel.alphas(scale):
            rows = []
            for rate in rates(scale):
                cells = [panel.cell(alpha, Setting(rate, left)) for left in momenta(scale)]
                found = [relative(results, panel.dataset, cell) for cell in cells]
                rows.append(Row(cells, found, sum(bool(results.runs[cell]) for cell in cells)))
            if any(any(row.relative) for row in rows):
                grids[alpha] = rows
        if len(grids) > 1:
            shown += _over_alphas(results, grids, where)
        for alpha, rows in grids.items():
            # What is hardly a grid is shown with the other α.
            least = min(row.num_run for row in rows)
            if len(grids) == 1 or least >= min(2, len(momenta(scale))):
                shown += _of_alpha(results, rows, f"{where}, α = {alpha:g}")
    return [*shown, note(__name__, "The grid")]


def _contours(scale: Scale, z: list[list[float | None]], **more: Any) -> Contours:
    """Relative accuracies, in a row for each learning rate."""
    more |= {"y_label": "η_eff", "z_label": "relative accuracy"}
    return Contours(y=rates(scale), z=z, log_y=True, percent=True, **more)


def _of_alpha(results: Results, grid: Grid, where: str) -> list[Block]:
    """A grid as contours and as a table, which also has the best over momenta."""
    scale = results.scale
    lefts = [f"{left:.2g}" for left in momenta(scale)]
    top = max(row.best for row in grid if row.best is not None)
    best_cell = next(row.cells[row.relative.index(top)] for row in grid if top in row.relative)
    ended, rows = [], []
    for rate, row in zip(rates(scale), grid, strict=True):
        of_ended = zip(lefts, row.cells, strict=True)
        if broken := [left for left, cell in of_ended if results.diverged(cell) is not None]:
            ended.append(f"η_eff {rate:.2g} with 1 − β {', '.join(broken)}")
        ends = [at_the_end(results, cell) for cell in row.cells]
        of_best = (NONE, NONE)
        if row.best is not None:
            of_best = ends[row.relative.index(row.best)], f"{row.best:.1%}"
        rows.append([f"{rate:.2g}", *ends, *of_best])
    return [
        _contours(
            scale,
            [row.relative for row in grid],
            title=where,
            caption="Relative accuracy over the grid of effective learning rate and momentum, "
            "after the last round. The star is the best single last evaluation, and evaluations "
            "swing: those of the last quarter of its run have a standard deviation of "
            f"{100 * results.swing(best_cell):.1f} points. So it need not be the best setting."
            + (f" Runs that diverged have no point: {'; '.join(ended)}." if ended else ""),
            x=momenta(scale),
            x_label="1 − β",
            log_x=True,
        ),
        Table(
            title=f"{where}: accuracy, %",
            header=("η_eff", *(f"1 − β = {x}" for x in lefts), "best over momenta", "relative"),
            rows=rows,
        ),
    ]


def _over_alphas(results: Results, grids: Mapping[float, Grid], where: str) -> list[Block]:
    """A panel of the paper's figure, a table of its accuracies, and one of what it is made of."""
    scale = results.scale
    every, fewer = len(momenta(scale)), []
    for alpha, grid in grids.items():
        least, most = (end(row.num_run for row in grid) for end in (min, max))
        if least < every:
            fewer.append(f"α {alpha:g} with {least}" + (f" to {most}" if most > least else ""))
    tried = f"Not run with all {every} momenta: {', '.join(fewer)}." if fewer else ""
    by_rate = [*zip(*grids.values(), strict=True)]

    def best(row: Row) -> str:
        """The best accuracy of a learning rate; if all of its runs diverged, when the first did."""
        run = [place for place, cell in enumerate(row.cells) if results.runs[cell]]
        if not run:
            return NONE
        place = run[0] if row.best is None else row.relative.index(row.best)
        return f"{at_the_end(results, row.cells[place])} at {momenta(scale)[place]:.2g}"

    of_alphas = [f"α = {alpha:g}" for alpha in grids]
    of_settings = [
        [f"{rate:.2g}", f"{left:.2g}", *(at_the_end(results, cell) for cell in cells)]
        for rate, of_rate in zip(rates(scale), by_rate, strict=True)
        for left, *cells in zip(momenta(scale), *(row.cells for row in of_rate), strict=True)
        if sum(bool(results.runs[cell]) for cell in cells) > 1
    ]
    each = Table(
        title=f"{where}: accuracy of each setting, %",
        header=("η_eff", "1 − β", *of_alphas),
        rows=of_settings,
    )
    return [
        _contours(
            scale,
            [[row.best for row in of_rate] for of_rate in by_rate],
            title=f"{where}: best over momenta",
            caption=tried,
            x=list(range(1, len(grids) + 1)),
            x_names=[f"{alpha:g}" for alpha in grids],
            x_label="α",
        ),
        Table(
            title=f"{where}: best accuracy over momenta, %",
            caption=tried,
            header=("η_eff", *of_alphas),
            rows=[
                [f"{rate:.2g}", *map(best, of_rate)]
                for rate, of_rate in zip(rates(scale), by_rate, strict=True)
            ],
        ),
        *([each] if fewer else []),
    ]
