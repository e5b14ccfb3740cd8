"""The heat map of ByzFL: geometric median after mixing, under the worst of three attacks."""

from __future__ import annotations

from itertools import product

from fedlens.config.experiment import Clients, Evaluate, Experiment, LocalTraining, Named
from fedlens.recipes.page import beside, note, published, recipe
from fedlens.recipes.recipe import Measured, Recipe, Results, Scale
from fedlens.report.blocks import Block, Heat

HONEST = 10
ATTACKS = ("sign-flip", "optimal-ipm", "optimal-alie")
MOMENTUM = 0.9
LR = 0.1 * (1 - MOMENTUM)  # of m = 0.9 m + g, for 0.1 with m = 0.9 m + 0.1 g


def axes(scale: Scale) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """γ, and the numbers of hostile clients."""
    few = ("0.33", "1"), (1, 4)
    return scale.pick(few, few, (("0.33", "0.66", "1"), (1, 2, 3, 4)))


def cell(gamma: str, hostile: int, attack: str) -> str:
    return f"γ {gamma}, f {hostile}, {attack}"


def byzfl_heat_map(scale: Scale) -> Recipe:
    cells = {cell(*one): _experiment(scale, *one) for one in product(*axes(scale), ATTACKS)}
    return recipe(__name__, scale, "byzfl-heat-map", blocks, cells=cells, on=["mnist"])


def _experiment(scale: Scale, gamma: str, hostile: int, attack: str) -> Experiment:
    alike = {"alike": float(gamma), "mixed": hostile}
    return scale.experiment(
        "mnist",
        ("linear", "byzfl-cnn", "byzfl-cnn"),
        (2, 100, 800),
        clients=Clients(count=HONEST + hostile, partition=Named("slices", alike)),
        local=LocalTraining(
            steps=1, batch_size=25, lr=LR, momentum=MOMENTUM, weight_decay=1e-4, reset=False
        ),
        evaluate=Evaluate(every=scale.pick(2, 50, 50)),
        algorithm=(Named("geometric-median"), Named("nnm", {"byzantine": hostile})),
        attack=Named(attack, {"clients": [*range(HONEST, HONEST + hostile)]}),
    )


def worst(results: Results, gamma: str, hostile: int) -> Measured | None:
    """The least mean over seeds, among the attacks."""
    found = [results.final(cell(gamma, hostile, attack)) for attack in ATTACKS]
    return min(filter(None, found), key=lambda one: one.mean, default=None)


def blocks(results: Results) -> list[Block]:
    theirs = published(__name__)["byzfl"]
    rows, columns = axes(results.scale)
    found = {(g, f): worst(results, g, f) for g, f in product(rows, columns)}
    heat = Heat(
        title="Accuracy under the worst attack",
        values=[[one.mean if (one := found[g, f]) else None for f in columns] for g in rows],
        row_names=rows,
        column_names=[str(hostile) for hostile in columns],
        row_label="γ, the share of examples that is alike",
        column_label="hostile clients, beside ten honest ones",
        value_label="test accuracy",
        percent=True,
        digits=1,
    )
    table = beside(
        [(f"γ {g}, f {f}", theirs[g][f - 1], one) for (g, f), one in found.items()],
        title="Beside the published map, %",
        of="setting",
        compared=results.scale.dataset("mnist") == "mnist",
    )
    return [heat, table, note(__name__, "What differs from ByzFL")]
