"""Figure 4 and its pilot."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

import torch

from fedlens.config.experiment import Evaluate, Experiment
from fedlens.data.emd import emd_per_client
from fedlens.recipes.hsu2020.cifar import (
    CENTRALISED,
    NO_POINT,
    Point,
    Rate,
    Setting,
    alphas,
    at_point,
    centralised,
    chosen,
    chosen_rate,
    datasets,
    experiment,
    grid,
    momenta,
    published_emd,
    rates,
    recipe,
    relative,
)
from fedlens.recipes.hsu2020.setting import BASES, PUBLISHED
from fedlens.recipes.page import beside, note
from fedlens.recipes.recipe import Recipe, Results, Scale
from fedlens.report.blocks import Block, Curves, Heat, Line, Strip, Table
from fedlens.runs.records import Run

T = TypeVar("T")


def report_goals(scale: Scale) -> tuple[int, ...]:
    return scale.pick((2,), (10,), (5, 10, 20, 40))


def figure4(scale: Scale) -> Recipe:
    """Figure 4: relative accuracy against how unalike clients are, on CIFAR-10 and CIFAR-100."""
    cells = {}
    for dataset in datasets(scale):
        cells[f"{dataset}, centralised"] = centralised(scale, dataset)
        for alpha, base, k in itertools.product(alphas(scale, dataset), BASES, report_goals(scale)):
            point = _point(scale, dataset, alpha, base)
            if point is None:
                one = experiment(scale, dataset, alpha, BASES[base], k)
            elif point.momentum:
                one = at_point(scale, dataset, alpha, point, k)
            else:
                one = experiment(scale, dataset, alpha, per_round=k, lr=point.lr)
            cells[_cell(scale, dataset, alpha, base, k)] = one
    seeds = range(scale.pick(1, 1, 3))
    return recipe(scale, "figure4", cells=cells, seeds=seeds, blocks=blocks, of_diverged=NO_POINT)


def _point(scale: Scale, dataset: str, alpha: float, base: str) -> Point | None:
    """The learning rate and momentum that the pilot picked, if there was one."""
    return chosen(dataset, alpha, base) if scale.name == "paper" else None


def _is_plain(scale: Scale, dataset: str, alpha: float, base: str) -> bool:
    """Whether a method has no momentum there: FedAvg, or FedAvgM if the pilot picked none."""
    point = _point(scale, dataset, alpha, base)
    return base == "FedAvg" if point is None else not point.momentum


def _cell(scale: Scale, dataset: str, alpha: float, base: str, k: int) -> str:
    """The name of a cell. If the pilot picked no momentum for FedAvgM, it is FedAvg's cell."""
    base = "FedAvg" if _is_plain(scale, dataset, alpha, base) else base
    return f"{dataset}, α {alpha:g}, {base}, K {k}"


def blocks(results: Results) -> list[Block]:
    shown: list[Block] = []
    for dataset in datasets(results.scale):
        runs = {
            a: run for a in alphas(results.scale, dataset) if (run := _any(results, dataset, a))
        }
        if not runs:
            continue
        theirs = PUBLISHED[dataset]["centralised"]
        emds = {a: run.summary["emd"] for a, run in runs.items()}
        shown += [
            _curves(results, dataset, emds),
            Strip(
                title=f"{dataset}: how unalike clients are",
                groups=[(f"α {a:g}", _client_emds(run)) for a, run in runs.items()],
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
                [(dataset, theirs, results.final(f"{dataset}, centralised"))],
                title=f"{dataset}: centralised accuracy, %",
            ),
        ]
    return [*shown, note(__name__, "What the paper finds")]


def _client_emds(run: Run) -> list[float]:
    """The EMD of each client from the population."""
    assert run.partition is not None
    found: list[float] = emd_per_client(torch.tensor(run.partition["label_counts"])).tolist()
    return found


def _any(results: Results, dataset: str, alpha: float) -> Run | None:
    """Any run at a concentration, or None: clients are the same in all of them."""
    scale = results.scale
    keys = itertools.product(BASES, report_goals(scale))
    cells = [_cell(scale, dataset, alpha, base, k) for base, k in keys]
    return next((run for cell in cells for run in results.runs[cell]), None)


def _curves(results: Results, dataset: str, emds: dict[float, float]) -> Curves:
    lines = []
    for base, k in itertools.product(BASES, report_goals(results.scale)):
        cells = {  # without cells of FedAvgM that are FedAvg's
            a: _cell(results.scale, dataset, a, base, k)
            for a in emds
            if base == "FedAvg" or not _is_plain(results.scale, dataset, a, base)
        }
        if any(results.runs[cell] for cell in cells.values()):
            y = [relative(results, dataset, cell) for cell in cells.values()]
            ended = [f"{a:g}" for a, cell in cells.items() if results.diverged(cell) is not None]
            ends = f"diverged at α {', '.join(ended)}" if ended else ""
            lines.append(Line(f"{base}, K {k}", [emds[a] for a in cells], y, note=ends))
    rate = "the rate that the pilot picked" if chosen_rate(dataset) else "the clients' default rate"
    return Curves(
        title=f"{dataset}: relative accuracy",
        caption="Test accuracy after the last round, divided by that of centralised training, "
        f"which has {rate}. FedAvgM has points only where it has momentum: where the pilot picked "
        "none for it, it is FedAvg, and both are one run. Runs that diverged have no point, "
        "however good they were before: the names of the lines say at which α.",
        lines=lines,
        x_label="mean EMD",
        y_label="relative accuracy",
        percent=True,
        levels=[("centralised", 1.0)],
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
    return recipe(scale, "figure4-pilot", cells=cells, blocks=_pilot_blocks, ours=True)


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


def best_rates(results: Results) -> dict[str, Rate]:
    """The best rate of centralised training, by data set."""
    rates = _rates(results.scale)
    picked = {d: _best(results, {r: _alone(d, r) for r in rates}) for d in datasets(results.scale)}
    return {dataset: rate for dataset, rate in picked.items() if rate}


def best(results: Results) -> dict[str, dict[str, dict[str, Point]]]:
    """The best point, by data set, concentration and base."""
    scale = results.scale
    picked: dict[str, dict[str, dict[str, Point]]] = {}
    for dataset in datasets(scale):
        for alpha, base in itertools.product(alphas(scale, dataset), BASES):
            cells = {
                setting.point: _pilot_cell(dataset, alpha, setting)
                for setting in grid(scale)
                if base != "FedAvg" or setting.left == 1
                if setting.left < 1 or not _diverged(scale, dataset, alpha, setting.rate)
            }
            if point := _best(results, cells):
                picked.setdefault(dataset, {}).setdefault(f"{alpha:g}", {})[base] = point
    return picked


def _diverged(scale: Scale, dataset: str, alpha: float, rate: float) -> bool:
    """Whether the full run at this rate without momentum diverged in Figure 4."""
    return scale.name == "paper" and rate in DIVERGED.get(dataset, {}).get(alpha, ())


def to_store(results: Results) -> dict[str, Mapping[str, object]]:
    """The content of chosen.json."""
    rates = {name: {CENTRALISED: rate} for name, rate in best_rates(results).items()}
    picked = best(results)
    return {name: {**picked.get(name, {}), **rates.get(name, {})} for name in {**picked, **rates}}


def _pilot_blocks(results: Results) -> list[Block]:
    picked = best(results)
    rows = [
        [dataset, alpha, base, f"{point.lr:.3g}", f"{point.momentum:.3g}"]
        for dataset, by_alpha in picked.items()
        for alpha, by_base in by_alpha.items()
        for base, point in by_base.items()
    ]
    return [
        Table(
            title="What the pilot picks",
            header=("data", "α", "method", "learning rate", "server momentum"),
            rows=rows,
        ),
        *(_grid(results, dataset) for dataset in picked),
        *(_grid_centralised(results, *rate) for rate in best_rates(results).items()),
        replace(note(__name__, "For Figure 4"), code=json.dumps(to_store(results), indent=1)),
    ]


def _grid_centralised(results: Results, dataset: str, picked: Rate) -> Table:
    """A table of all rates of centralised training that were run."""
    ends = {r: results.final(_alone(dataset, r), MEASURE) for r in _rates(results.scale)}
    return Table(
        title=f"{dataset}: centralised training",
        header=("schedule", "learning rate", "validation accuracy, %", ""),
        rows=[
            [rate.schedule, f"{rate.lr:.2g}", f"{100 * end.mean:.2f}", "picked" * (rate == picked)]
            for rate, end in ends.items()
            if end
        ],
    )


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
