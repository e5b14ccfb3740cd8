"""FedProx, the report's next step (section 5 and Figure 19)."""

from __future__ import annotations

from fedlens.experiment import Named
from fedlens.recipes.fedavg_cifar10.setting import Sizes, experiment, sizes, stand_in
from fedlens.recipes.page import curves
from fedlens.recipes.recipe import Recipe, Results, Scale
from fedlens.report.blocks import Bars, Block, Series, Text

LEVELS: tuple[Sizes, ...] = ("low", "high")


def fedprox(scale: Scale) -> Recipe:
    mus = scale.pick((0.0, 0.1), (0.0, 0.1, 1.0), (0.0, 0.01, 0.1, 1.0))
    return Recipe(
        title="FedProx",
        about="The report names FedProx as what it would do next about heterogeneity. Here it is, "
        "on its own heterogeneous clients, K = 10, C = 5; mu = 0 is FedAvg.",
        cells={
            f"{how}, mu {mu:g}": experiment(
                scale,
                Named("fedprox", {"mu": mu}),
                count=10,
                per_round=5,
                partition=sizes(how),
                rounds=20,
            )
            for how in LEVELS
            for mu in mus
        },
        seeds=range(scale.pick(1, 1, 3)),
        blocks=blocks,
        stand_in=stand_in(scale),
    )


def blocks(results: Results) -> list[Block]:
    mus = list(dict.fromkeys(cell.split(", ")[1] for cell in results.runs))
    series = []
    for how in LEVELS:
        found = [results.final(f"{how}, {mu}") for mu in mus]
        series.append(Series(how, [f and f.mean for f in found], [f and f.std for f in found]))
    return [
        Bars(
            title="Accuracy by mu",
            caption="Test accuracy after the last round, at the report's two levels of "
            "heterogeneity; mu = 0 is FedAvg.",
            groups=mus,
            series=series,
            y_label="test accuracy",
            percent=True,
        ),
        *(
            curves(
                results,
                {f"{how}, {mu}": mu for mu in mus},
                title=f"{how} heterogeneity: test accuracy by round",
                caption="Accuracy on the test images after each round.",
                y_label="test accuracy",
            )
            for how in LEVELS
        ),
        Text(
            title="What to expect",
            paragraphs=(
                "FedProx is made for clients whose data pull in different directions. The report's "
                "clients differ in how much they hold and not in what, so there is little for the "
                "proximal term to mend: expect it to slow clients down and not to help.",
            ),
        ),
    ]
