"""The pilot of Figure 4: which learning rate and momentum, at every concentration.

The paper reports the best of a grid, and does not say by which images it is the best. Here a tenth
of the training images is set apart, and short runs over Figure 8's grid are judged by them alone.
What they pick goes into chosen.json, beside this file, which Figure 4 reads.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from importlib.resources import files
from typing import NamedTuple

from fedlens.experiment import Evaluate, Experiment, Named
from fedlens.recipes.hsu2020.cifar import alphas, datasets, experiment, stand_in
from fedlens.recipes.hsu2020.figure8 import momenta, rates
from fedlens.recipes.hsu2020.setting import BASES
from fedlens.recipes.recipe import Recipe, Results, Scale
from fedlens.report.blocks import Block, Table, Text
from fedlens.report.grids import Heat

GOAL = 10  # clients a round
SEED = 0  # of the split, so that the same images are set apart in every run
MEASURE = "validation_accuracy"
CHOSEN = "chosen.json"


class Point(NamedTuple):
    """A point of the grid: the clients' learning rate and the server's momentum."""

    lr: float
    momentum: float


@cache
def _chosen() -> dict[str, dict[str, dict[str, list[float]]]]:
    found: dict[str, dict[str, dict[str, list[float]]]] = json.loads(
        (files("fedlens.recipes.hsu2020") / CHOSEN).read_text(encoding="utf-8")
    )
    return found


def chosen(dataset: str, alpha: float, base: str) -> Point | None:
    """What the pilot picked for a data set, a concentration and FedAvg or FedAvgM."""
    found = _chosen().get(dataset, {}).get(f"{alpha:g}", {}).get(base)
    return Point(*found) if found else None


def figure4_pilot(scale: Scale) -> Recipe:
    cells = {
        _name(dataset, alpha, rate, left): _experiment(scale, dataset, alpha, rate, left)
        for dataset in datasets(scale)
        for alpha in alphas(scale, dataset)
        for rate in rates(scale)
        for left in momenta(scale)
    }
    return Recipe(
        title="The pilot of Figure 4",
        about="Short runs over Figure 8's grid of effective learning rates and momenta, K = 10, a "
        "tenth of the rounds. They are judged by a tenth of the training images, which they do not "
        "train on; test images choose nothing. FedAvg takes the best where the momentum is 0, "
        "FedAvgM the best of all.",
        cells=cells,
        blocks=blocks,
        stand_in=stand_in(scale),
    )


def _name(dataset: str, alpha: float, rate: float, left: float) -> str:
    return f"{dataset}, α {alpha:g}, η_eff {rate:.2g}, 1-β {left:.2g}"


def _experiment(scale: Scale, dataset: str, alpha: float, rate: float, left: float) -> Experiment:
    server = Named("fedavgm", {"momentum": 1 - left})
    whole = experiment(scale, dataset, alpha, (server,), GOAL, lr=rate * left)
    rounds = scale.pick(2, 20, whole.rounds // 10)
    return replace(
        whole,
        rounds=rounds,
        clients=replace(whole.clients, seed=SEED),
        evaluate=Evaluate(every=rounds, on=("validation",)),
    )


def best(results: Results) -> dict[str, dict[str, dict[str, Point]]]:
    """What the runs pick: by data set, concentration and base."""
    scale = results.scale
    picked: dict[str, dict[str, dict[str, Point]]] = {}
    for dataset in datasets(scale):
        for alpha in alphas(scale, dataset):
            for base in BASES:
                points = {
                    Point(rate * left, 1 - left): results.final(
                        _name(dataset, alpha, rate, left), MEASURE
                    )
                    for rate in rates(scale)
                    for left in momenta(scale)
                    if base != "FedAvg" or left == 1
                }
                found = {point: one.mean for point, one in points.items() if one}
                if found:
                    by_base = picked.setdefault(dataset, {}).setdefault(f"{alpha:g}", {})
                    by_base[base] = max(found, key=lambda point: found[point])
    return picked


def blocks(results: Results) -> list[Block]:
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
            caption="The point of the grid with the best validation accuracy.",
            header=("data", "α", "method", "learning rate", "server momentum"),
            rows=rows,
        ),
        *(_grid(results, dataset) for dataset in picked),
        Text(
            title="For Figure 4",
            paragraphs=(
                f"At the paper's scale these points belong into {CHOSEN}, beside this recipe's "
                "file: Figure 4 then starts from them.",
            ),
            code=json.dumps(picked, indent=1),
        ),
    ]


def _grid(results: Results, dataset: str) -> Heat:
    """Every point that was run, at every concentration: one picture a data set."""
    scale = results.scale
    rows = alphas(scale, dataset)
    points = [
        (rate, left)
        for left in momenta(scale)
        for rate in rates(scale)
        if any(_name(dataset, alpha, rate, left) in results.runs for alpha in rows)
    ]
    values = [
        [
            found.mean if (found := results.final(_name(dataset, alpha, *point), MEASURE)) else None
            for point in points
        ]
        for alpha in rows
    ]
    best_of = []
    for i, row in enumerate(values):
        scored = [(value, j) for j, value in enumerate(row) if value is not None]
        if scored:
            best_of.append((i, max(scored, key=lambda one: one[0])[1]))
    return Heat(
        title=f"{dataset}: validation accuracy",
        caption="Accuracy in percent on the images set apart: a row for each concentration of the "
        "classes, a column for each point of the grid, by its effective learning rate η_eff and "
        "1 − β of the server's momentum. The best of a row has a frame.",
        values=values,
        row_names=[f"α {alpha:g}" for alpha in rows],
        column_names=[f"η_eff {rate:.2g}, 1−β {left:.2g}" for rate, left in points],
        value_label="validation accuracy",
        percent=True,
        best=frozenset(best_of),
    )
