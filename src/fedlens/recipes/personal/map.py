"""Where local-only, FedAvg, fine-tuning or a personal method is best: by skew and by size."""

from __future__ import annotations

import itertools
import statistics

import numpy as np

from fedlens.config.experiment import Clients, Evaluate, Experiment, LocalTraining, Named
from fedlens.recipes.page import note, recipe
from fedlens.recipes.personal.boards import ALONE, METHODS, TUNED, by_client
from fedlens.recipes.recipe import Recipe, Results, Scale
from fedlens.report.blocks import Block, Contours, Table, Tiles
from fedlens.report.pairs import corrected, is_sure, points
from fedlens.report.personal import shares

TRAINED = (TUNED, ALONE, "FedPer", "Ditto")
METHOD = "a method"  # the better of those that are no baseline
KINDS = (ALONE, "FedAvg", TUNED, METHOD)
PAIRS = (("FedAvg", ALONE), (TUNED, ALONE), (TUNED, "FedAvg"), ("FedPer", TUNED), ("Ditto", TUNED))

At = tuple[float, int]
"""An α and a number of training images of a client."""


def alphas(scale: Scale) -> tuple[float, ...]:
    every = (0.05, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 100.0)
    return scale.pick((0.05, 100.0), (0.05, 0.5, 2.0, 10.0, 100.0), every)


def sizes(scale: Scale) -> tuple[int, ...]:
    every = (50, 120, 250, 500, 1000, 2000, 4000)
    return scale.pick((50, 200), (50, 250, 1000, 4000), every)


def cell(at: At, name: str) -> str:
    return f"α {at[0]:g}, {at[1]} images, {name}"


def map(scale: Scale) -> Recipe:
    grid = [*itertools.product(alphas(scale), sizes(scale))]
    cells = {cell(at, name): _experiment(scale, at, name) for at in grid for name in TRAINED}
    on, seeds = ["cifar10"], (1, 2, 10)
    return recipe(__name__, scale, "map", blocks, cells=cells, on=on, seeds=seeds, ours=True)


def _experiment(scale: Scale, at: At, name: str) -> Experiment:
    alpha, size = at
    tested = scale.pick(100, 1000, 1000)
    return scale.experiment(
        "cifar10",
        ("lenet5", "hsu-cnn", "hsu-cnn"),
        (2, 30, 100),
        clients=Clients(
            count=scale.pick(4, 10, 10),
            holdout=(tested + 0.5) / (size + tested),
            partition=Named("dirichlet", {"alpha": alpha, "size": size + tested}),
        ),
        local=LocalTraining(steps=scale.pick(2, 20, 20), batch_size=32, lr=0.05),
        evaluate=Evaluate(every=scale.pick(2, 30, 100), on=(), baselines=False),
        algorithm=(METHODS[name],),
    )


def scores(results: Results, at: At, name: str) -> dict[int, float]:
    """The mean over clients of accuracy after the last round, by seed.

    The runs that tune FedAvg's model are those of FedAvg, too: before they tune it.
    """
    found = {}
    for run in results.runs[cell(at, TUNED if name == "FedAvg" else name)]:
        own = shares(run, "client_accuracy") if name == "FedAvg" else by_client(run)
        if len(own) and np.isfinite(own).all():
            found[int(run.manifest["seed"])] = float(np.mean(own))
    return found


def differences(results: Results, at: At, one: str, other: str) -> list[float]:
    """One's accuracy minus the other's, paired by seed: clients of a seed are not independent."""
    a, b = scores(results, at, one), scores(results, at, other)
    return [a[seed] - b[seed] for seed in a if seed in b]


def winner(results: Results, at: At) -> str | None:
    """The kind with the highest mean over seeds."""
    found = {name: scores(results, at, name) for name in ("FedAvg", *TRAINED)}
    means = {name: statistics.fmean(one.values()) for name, one in found.items() if one}
    best = max(means, key=lambda name: means[name], default=None)
    return METHOD if best not in (None, *KINDS) else best


def blocks(results: Results) -> list[Block]:
    x, y = alphas(results.scale), sizes(results.scale)
    grid = itertools.product(itertools.product(x, y), PAIRS)
    found = {(at, pair): differences(results, at, *pair) for at, pair in grid}
    compared = corrected({key: values for key, values in found.items() if values})
    rows = [
        [
            f"{at[0]:g}",
            f"{at[1]:,}",
            f"{pair[0]} − {pair[1]}",
            points(one.mean),
            one.between,
            one.chance + ", maybe chance" * (one.p is not None and not is_sure(one.p)),
            str(one.n),
        ]
        for (at, pair), one in compared.items()
    ]
    means = {key: one.mean for key, one in compared.items()}
    shown: list[Block] = [
        Contours(
            title=" − ".join(pair),
            x=x,
            y=y,
            z=[[means.get(((alpha, size), pair)) for alpha in x] for size in y],
            x_label="α",
            y_label="training images of a client",
            z_label="difference in accuracy",
            log_x=True,
            log_y=True,
            percent=True,
        )
        for pair in PAIRS
    ]
    tiles = Tiles(
        title="Who is best where",
        values=[[winner(results, (alpha, size)) for alpha in x] for size in reversed(y)],
        row_names=[f"{size:,}" for size in reversed(y)],
        column_names=[f"{alpha:g}" for alpha in x],
        row_label="training images of a client",
        column_label="α",
        kinds=KINDS,
    )
    header = ("α", "images", "difference", "points", "95% confidence interval", "p (Holm)", "seeds")
    table = Table(title="All differences", header=header, rows=rows)
    return [tiles, *shown, table, note(__name__, "How the map is read")]
