"""Figure 7: Landmarks-User-160k learning curves, the last two layers."""

from __future__ import annotations

from fedlens.recipes.hsu2020 import table4
from fedlens.recipes.hsu2020.setting import GOALS, goal, goals, is_other_data, population, stand_in
from fedlens.recipes.page import curves
from fedlens.recipes.recipe import Recipe, Results, Scale
from fedlens.report.blocks import Block


def figure7(scale: Scale) -> Recipe:
    return Recipe(
        title="Curves of the last two layers",
        about="Only the last two layers are trained. FedIR speeds learning up, most of all with a "
        "small report goal K, and FedAvgM more than either. The runs are those of Table 4.",
        cells=table4.cells(scale, "two layers"),
        seeds=range(scale.pick(1, 1, 3)),
        blocks=blocks,
        stand_in=stand_in(population(scale, "landmarks")),
        other_data=is_other_data(population(scale, "landmarks")),
    )


def blocks(results: Results) -> list[Block]:
    return [
        curves(
            results,
            {
                f"two layers, {method.name}": method._replace(goal=0).name
                for method in table4.chosen(results.scale)
                if method.goal == k
            },
            title=f"K = {goal(results.scale, k)}: test accuracy",
            caption="Accuracy on the test images while the last two layers are trained.",
            y_label="test accuracy",
        )
        for k in goals(results.scale, *GOALS)
    ]
