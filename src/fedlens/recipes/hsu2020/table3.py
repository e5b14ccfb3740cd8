"""Table 3: the iNaturalist-User-120k benchmark."""

from __future__ import annotations

from fedlens.config.experiment import Experiment, Named
from fedlens.recipes.hsu2020.setting import (
    BASES,
    OUR_EPOCHS,
    Method,
    Row,
    at_budgets,
    centralised,
    experiment,
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
    Method("FedAvg", goal=10): (31.3, 39.7, 43.9),
    Method("FedAvg", goal=100): (36.9, 46.5, 51.4),
    Method("FedAvg", "FedIR", 10): (30.1, 41.3, 47.5),
    Method("FedAvg", "FedIR", 100): (35.5, 44.8, 49.8),
    Method("FedAvgM", goal=10): (37.9, 43.7, 49.1),
    Method("FedAvgM", goal=100): (53.0, 56.1, 57.2),
    Method("FedAvgM", "FedIR", 10): (38.4, 42.1, 47.0),
    Method("FedAvgM", "FedIR", 100): (51.3, 54.3, 56.2),
}
"""All with FedVC; K is the paper's report goal."""


def cells(scale: Scale) -> dict[str, Experiment]:
    clients = population(scale, "user")
    found = {}
    for method in PUBLISHED:
        reweighted = (Named("fedir"),) if method.added else ()
        algorithm = (virtual(scale), *reweighted, *BASES[method.base])
        found[method.name] = experiment(scale, clients, algorithm, method.goal)
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
    for method, published in PUBLISHED.items():
        goal = said_goal(results.scale, method.goal)
        first = (method.base, "yes" if method.added else "no", goal)
        rows.append((first, method.name, published))
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
            [method.name for method in PUBLISHED],
            title="Test accuracy by round",
            caption="Accuracy on the test images, all with virtual clients.",
            y_label="test accuracy",
        ),
    ]
