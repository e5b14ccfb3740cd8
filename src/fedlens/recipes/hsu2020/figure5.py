"""Figure 5: base methods with and without FedIR, at 2.5k rounds."""

from __future__ import annotations

from fedlens.recipes.hsu2020 import table3, table4
from fedlens.recipes.hsu2020.setting import (
    Method,
    at_budget,
    goal,
    is_other_data,
    population,
    rounds,
    stand_in,
)
from fedlens.recipes.recipe import Recipe, Results, Scale
from fedlens.report.blocks import Bars, Block, Series

MIDDLE = 1  # index of 2.5k in the three numbers of rounds of the tables


def figure5(scale: Scale) -> Recipe:
    users = {f"iNaturalist, {cell}": one for cell, one in table3.cells(scale).items()}
    landmarks = {
        f"Landmarks, {cell}": one for cell, one in table4.cells(scale, *table4.LAYERS).items()
    }
    return Recipe(
        title="With and without FedIR",
        about="Accuracy at 2.5k rounds (or what stands for them) of FedAvg and FedAvgM with and "
        "without importance reweighting. The runs are those of Tables 3 and 4, and so are the "
        "published heights.",
        cells=users | landmarks,
        seeds=range(scale.pick(1, 1, 3)),
        blocks=blocks,
        stand_in=stand_in(population(scale, "user"), population(scale, "landmarks")),
        other_data=is_other_data(population(scale, "user"), population(scale, "landmarks")),
    )


def blocks(results: Results) -> list[Block]:
    theirs = {method: numbers[MIDDLE] for method, numbers in table3.PUBLISHED.items()}
    charts: list[Block] = [_chart(results, "iNaturalist", "", theirs)]
    for place, layers in enumerate(table4.LAYERS):
        theirs = {method: numbers[place][MIDDLE] for method, numbers in table4.PUBLISHED.items()}
        charts.append(_chart(results, "Landmarks", f"{layers}, ", theirs))
    return charts


def _chart(results: Results, where: str, layers: str, theirs: dict[Method, float]) -> Bars:
    budget = rounds(results.scale)[MIDDLE]
    cells = {method: f"{where}, {layers}{method.name}" for method in theirs}
    plain = [method for method in theirs if not method.added and cells[method] in results.runs]
    with_ = [method._replace(added="FedIR") for method in plain]

    def heights(methods: list[Method]) -> tuple[list[float | None], list[float | None]]:
        found = [at_budget(results, cells[method], budget) for method in methods]
        return [f and f.mean for f in found], [f and f.std for f in found]

    return Bars(
        title=f"{where}, {layers or 'virtual clients, '}at {budget:,} rounds".replace(", , ", ", "),
        caption="Test accuracy without and with FedIR. Hollow: published, at 2.5k rounds.",
        groups=[f"{m.base}, K {goal(results.scale, m.goal)}" for m in plain],
        series=[
            Series("without FedIR", *heights(plain)),
            Series("with FedIR", *heights(with_)),
            Series("published, without", [theirs[method] / 100 for method in plain], hollow=True),
            Series("published, with", [theirs[method] / 100 for method in with_], hollow=True),
        ],
        y_label="test accuracy",
        percent=True,
    )
