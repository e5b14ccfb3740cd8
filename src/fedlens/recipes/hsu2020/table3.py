"""Table 3: the iNaturalist-User-120k benchmark."""

from __future__ import annotations

from fedlens.experiment import Experiment, Named
from fedlens.recipes.hsu2020.setting import (
    BASES,
    OUR_EPOCHS,
    Row,
    at_budgets,
    centralised,
    experiment,
    goal_of,
    is_other_data,
    population,
    said_goal,
    stand_in,
    virtual,
)
from fedlens.recipes.hsu2020.table2 import CENTRALISED
from fedlens.recipes.page import beside, curves
from fedlens.recipes.recipe import Recipe, Results, Scale
from fedlens.report.blocks import Block

PUBLISHED = {
    "FedAvg, K 10": (31.3, 39.7, 43.9),
    "FedAvg, K 100": (36.9, 46.5, 51.4),
    "FedAvg, FedIR, K 10": (30.1, 41.3, 47.5),
    "FedAvg, FedIR, K 100": (35.5, 44.8, 49.8),
    "FedAvgM, K 10": (37.9, 43.7, 49.1),
    "FedAvgM, K 100": (53.0, 56.1, 57.2),
    "FedAvgM, FedIR, K 10": (38.4, 42.1, 47.0),
    "FedAvgM, FedIR, K 100": (51.3, 54.3, 56.2),
}
"""All with FedVC; K is the paper's report goal."""


def cells(scale: Scale) -> dict[str, Experiment]:
    clients = population(scale, "user")
    found = {}
    for cell in PUBLISHED:
        base, *more, _ = cell.split(", ")
        reweighted = (Named("fedir"),) if more else ()
        algorithm = (virtual(scale), *reweighted, *BASES[base])
        found[cell] = experiment(scale, clients, algorithm, goal_of(cell))
    return found


def table3(scale: Scale) -> Recipe:
    clients = population(scale, "user")
    return Recipe(
        title="The iNaturalist-User-120k benchmark",
        about="FedAvg and FedAvgM with virtual clients, with and without importance reweighting, "
        "for two report goals K, at fixed numbers of rounds. "
        f"{OUR_EPOCHS}",
        cells=cells(scale) | {"centralised": centralised(scale, clients)},
        seeds=range(scale.pick(1, 1, 3)),
        blocks=blocks,
        stand_in=stand_in(clients),
        other_data=is_other_data(clients),
    )


def blocks(results: Results) -> list[Block]:
    clients = population(results.scale, "user")
    rows: list[Row] = []
    for cell, published in PUBLISHED.items():
        base, *more, _ = cell.split(", ")
        first = (base, "yes" if more else "no", said_goal(results.scale, goal_of(cell)))
        rows.append((first, cell, published))
    return [
        at_budgets(
            results,
            rows,
            of=("method", "FedIR", "K"),
            title="Accuracy at rounds",
            caption=f"Test accuracy in % on {clients.called}.",
        ),
        beside(
            [(clients.called, CENTRALISED, results.final("centralised"))],
            title="Centralised, %",
            of="clients",
            compared=not clients.is_stand_in,
        ),
        curves(
            results,
            list(PUBLISHED),
            title="Test accuracy by round",
            caption="Accuracy on the test images, all with virtual clients.",
            y_label="test accuracy",
        ),
    ]
