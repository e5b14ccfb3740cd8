"""Table 4: the Landmarks-User-160k benchmark, two layers and all layers."""

from __future__ import annotations

from fedlens.config.experiment import Experiment, Named
from fedlens.recipes.hsu2020.setting import (
    BASES,
    GOALS,
    OUR_EPOCHS,
    Method,
    Row,
    at_budgets,
    centralised,
    experiment,
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
PUBLISHED: dict[Method, tuple[tuple[float, ...], tuple[float, ...]]] = {  # two layers, all layers
    Method("FedAvg", goal=10): ((4.2, 14.6, 24.6), (18.2, 38.1, 49.7)),
    Method("FedAvg", goal=50): ((4.5, 16.5, 26.0), (20.9, 42.0, 53.3)),
    Method("FedAvg", goal=100): ((4.9, 16.5, 26.3), (21.9, 42.3, 53.4)),
    Method("FedAvg", "FedIR", 10): ((6.3, 17.4, 26.6), (19.6, 38.5, 51.7)),
    Method("FedAvg", "FedIR", 50): ((7.4, 19.7, 28.8), (26.0, 45.2, 55.0)),
    Method("FedAvg", "FedIR", 100): ((7.2, 20.1, 29.0), (26.5, 45.7, 55.2)),
    Method("FedAvgM", goal=10): ((23.0, 30.1, 30.8), (29.4, 44.1, 53.7)),
    Method("FedAvgM", goal=50): ((29.9, 36.4, 38.6), (55.2, 62.0, 64.8)),
    Method("FedAvgM", goal=100): ((31.9, 37.4, 39.6), (56.3, 63.4, 65.0)),
    Method("FedAvgM", "FedIR", 10): ((26.5, 32.1, 31.3), (27.9, 45.1, 53.5)),
    Method("FedAvgM", "FedIR", 50): ((31.6, 37.5, 38.9), (53.1, 61.6, 63.2)),
    Method("FedAvgM", "FedIR", 100): ((33.7, 38.3, 39.8), (57.7, 64.1, 65.9)),
}
CENTRALISED = {"two layers": 0.4027, "all layers": 0.6705}


def chosen(scale: Scale) -> list[Method]:
    """The methods that are run at this scale."""
    return [method for method in PUBLISHED if method.goal in goals(scale, *GOALS)]


def cells(scale: Scale, *trained: str) -> dict[str, Experiment]:
    clients = population(scale, "landmarks")
    found = {}
    for layers in trained:
        for method in chosen(scale):
            reweighted = (Named("fedir"),) if method.added else ()
            found[f"{layers}, {method.name}"] = experiment(
                scale,
                clients,
                (*reweighted, *BASES[method.base]),
                method.goal,
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
        for method in chosen(results.scale):
            goal = said_goal(results.scale, method.goal)
            first = (method.base, "yes" if method.added else "no", goal)
            rows.append((first, f"{layers}, {method.name}", PUBLISHED[method][place]))
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
