"""Table 4: the Landmarks-User-160k benchmark, two layers and all layers."""

from __future__ import annotations

from fedlens.experiment import Experiment, Named
from fedlens.recipes.hsu2020.setting import (
    BASES,
    GOALS,
    OUR_EPOCHS,
    Row,
    at_budgets,
    centralised,
    experiment,
    goal_of,
    goals,
    is_other_data,
    population,
    said_goal,
    stand_in,
)
from fedlens.recipes.page import beside
from fedlens.recipes.recipe import Recipe, Results, Scale
from fedlens.report.blocks import Block

LAYERS = {"two layers": 2, "all layers": None}
PUBLISHED: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {  # two layers, all layers
    "FedAvg, K 10": ((4.2, 14.6, 24.6), (18.2, 38.1, 49.7)),
    "FedAvg, K 50": ((4.5, 16.5, 26.0), (20.9, 42.0, 53.3)),
    "FedAvg, K 100": ((4.9, 16.5, 26.3), (21.9, 42.3, 53.4)),
    "FedAvg, FedIR, K 10": ((6.3, 17.4, 26.6), (19.6, 38.5, 51.7)),
    "FedAvg, FedIR, K 50": ((7.4, 19.7, 28.8), (26.0, 45.2, 55.0)),
    "FedAvg, FedIR, K 100": ((7.2, 20.1, 29.0), (26.5, 45.7, 55.2)),
    "FedAvgM, K 10": ((23.0, 30.1, 30.8), (29.4, 44.1, 53.7)),
    "FedAvgM, K 50": ((29.9, 36.4, 38.6), (55.2, 62.0, 64.8)),
    "FedAvgM, K 100": ((31.9, 37.4, 39.6), (56.3, 63.4, 65.0)),
    "FedAvgM, FedIR, K 10": ((26.5, 32.1, 31.3), (27.9, 45.1, 53.5)),
    "FedAvgM, FedIR, K 50": ((31.6, 37.5, 38.9), (53.1, 61.6, 63.2)),
    "FedAvgM, FedIR, K 100": ((33.7, 38.3, 39.8), (57.7, 64.1, 65.9)),
}
CENTRALISED = {"two layers": 0.4027, "all layers": 0.6705}


def chosen(scale: Scale) -> list[str]:
    """The rows that are run at this scale."""
    run = [f"K {k}" for k in goals(scale, *GOALS)]
    return [row for row in PUBLISHED if row.split(", ")[-1] in run]


def cells(scale: Scale, *trained: str) -> dict[str, Experiment]:
    clients = population(scale, "landmarks")
    found = {}
    for layers in trained:
        for row in chosen(scale):
            base, *more, _ = row.split(", ")
            reweighted = (Named("fedir"),) if more else ()
            found[f"{layers}, {row}"] = experiment(
                scale,
                clients,
                (*reweighted, *BASES[base]),
                goal_of(row),
                layers=LAYERS[layers],
            )
    return found


def table4(scale: Scale) -> Recipe:
    clients = population(scale, "landmarks")
    bounds = {
        f"{layers}, centralised": centralised(scale, clients, LAYERS[layers]) for layers in LAYERS
    }
    return Recipe(
        title="The Landmarks-User-160k benchmark",
        about="FedAvg and FedAvgM with and without importance reweighting, for several report "
        "goals K, training the whole network or its last two layers. "
        f"{OUR_EPOCHS}",
        cells=cells(scale, *LAYERS) | bounds,
        seeds=range(scale.pick(1, 1, 3)),
        blocks=blocks,
        stand_in=stand_in(clients),
        other_data=is_other_data(clients),
    )


def blocks(results: Results) -> list[Block]:
    clients = population(results.scale, "landmarks")
    tables: list[Block] = []
    for place, layers in enumerate(LAYERS):
        rows: list[Row] = []
        for row in chosen(results.scale):
            base, *more, _ = row.split(", ")
            first = (base, "yes" if more else "no", said_goal(results.scale, goal_of(row)))
            rows.append((first, f"{layers}, {row}", PUBLISHED[row][place]))
        tables.append(
            at_budgets(
                results,
                rows,
                of=("method", "FedIR", "K"),
                title=f"Accuracy at rounds, {layers}",
                caption=f"Test accuracy in % on {clients.called}.",
            )
        )
    return [
        *tables,
        beside(
            [
                (layers, theirs, results.final(f"{layers}, centralised"))
                for layers, theirs in CENTRALISED.items()
            ],
            title="Centralised, %",
            of="trained",
            compared=not clients.is_stand_in,
        ),
    ]
