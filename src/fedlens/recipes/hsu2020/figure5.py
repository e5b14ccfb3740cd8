"""Figure 5: base methods with and without FedIR, at 2.5k rounds."""

from __future__ import annotations

from fedlens.recipes.hsu2020 import table3, table4
from fedlens.recipes.hsu2020.setting import (
    at_budget,
    goal,
    goal_of,
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
    charts: list[Block] = [_chart(results, "iNaturalist", "", _published_users())]
    for place, layers in enumerate(table4.LAYERS):
        theirs = {row: numbers[place][MIDDLE] for row, numbers in table4.PUBLISHED.items()}
        charts.append(_chart(results, "Landmarks", f"{layers}, ", theirs))
    return charts


def _published_users() -> dict[str, float]:
    return {row: numbers[MIDDLE] for row, numbers in table3.PUBLISHED.items()}


def _chart(results: Results, where: str, layers: str, theirs: dict[str, float]) -> Bars:
    budget = rounds(results.scale)[MIDDLE]
    plain = [
        row for row in theirs if "FedIR" not in row and f"{where}, {layers}{row}" in results.runs
    ]

    def reweighted(row: str) -> str:
        return row.replace(", K", ", FedIR, K")

    def heights(rows: list[str]) -> tuple[list[float | None], list[float | None]]:
        found = [at_budget(results, f"{where}, {layers}{row}", budget) for row in rows]
        return [f and f.mean for f in found], [f and f.std for f in found]

    def group(row: str) -> str:
        base, _ = row.split(", ")
        return f"{base}, K {goal(results.scale, goal_of(row))}"

    with_ = [reweighted(row) for row in plain]
    return Bars(
        title=f"{where}, {layers or 'virtual clients, '}at {budget:,} rounds".replace(", , ", ", "),
        caption="Test accuracy without and with FedIR. Hollow: published, at 2.5k rounds.",
        groups=[group(row) for row in plain],
        series=[
            Series("without FedIR", *heights(plain)),
            Series("with FedIR", *heights(with_)),
            Series("published, without", [theirs[row] / 100 for row in plain], hollow=True),
            Series("published, with", [theirs[row] / 100 for row in with_], hollow=True),
        ],
        y_label="test accuracy",
        percent=True,
    )
