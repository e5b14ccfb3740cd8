"""FedProx, the report's next step (section 5 and Figure 19)."""

from __future__ import annotations

from fedlens.config.experiment import Named
from fedlens.recipes.fedavg_cifar10.setting import Sizes, experiment, sizes, stand_in
from fedlens.recipes.page import at_the_end, curves
from fedlens.recipes.recipe import Recipe, Results, Scale
from fedlens.report.blocks import Bars, Block, Series, Table, Text

LEVELS: tuple[Sizes, ...] = ("low", "high")
PRINTED = "drawn by size"
"""As in Figure 19: a client is drawn with probability n_k / n, and the mean is unweighted."""
ALIKE = 5 / 10 * 45_500 / (45_500 + 4 * 500)
"""The mean weight of the largest `high` client with uniform draws: it is in half of the cohorts."""


def fedprox(scale: Scale) -> Recipe:
    mus = scale.pick((0.0, 0.1), (0.0, 0.1, 1.0), (0.0, 0.01, 0.1, 1.0))
    # By size, the largest client is drawn several times per round, which takes that much longer.
    printed = scale.pick((0.1,), (0.1,), (0.0, 0.1))
    rules = {f"mu {mu:g}": Named("fedprox", {"mu": mu}) for mu in mus}
    rules |= {
        f"mu {mu:g}, {PRINTED}": Named("fedprox", {"mu": mu, "sampling": "by-size"})
        for mu in printed
    }
    return Recipe(
        title="FedProx",
        about="The report names FedProx as what it would do next about heterogeneity. Here it is, "
        "on its own heterogeneous clients, K = 10, C = 5; mu = 0 is FedAvg. Clients are drawn "
        "alike and weighed by what they hold, as in FedAvg, and also as its Figure 19 prints it: "
        "drawn in proportion to what they hold, with a plain mean.",
        cells={
            f"{how}, {name}": experiment(
                scale,
                rule,
                count=10,
                per_round=5,
                partition=sizes(how),
                rounds=20,
            )
            for how in LEVELS
            for name, rule in rules.items()
        },
        seeds=range(scale.pick(1, 1, 3)),
        blocks=blocks,
        ours=True,
        stand_in=stand_in(scale),
    )


def blocks(results: Results) -> list[Block]:
    mus = list(dict.fromkeys(cell.partition(", ")[2] for cell in results.runs))
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
            digits=2,
        ),
        Table(
            title="Accuracy after the last round, %",
            caption="Test accuracy at the report's two levels of heterogeneity.",
            header=("", *LEVELS),
            rows=[[mu, *(at_the_end(results, f"{how}, {mu}") for how in LEVELS)] for mu in mus],
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
                "proximal term to correct: expect it to slow clients down and not to help.",
                "Drawn by size, the client with 91% of the images stands in most places of a "
                "cohort, each time with shuffles of its own, and has 91% of the weight in "
                "expectation: just what it holds. Drawn alike, it is in every other cohort, with "
                f"nearly all of the weight there and none in the others: {ALIKE:.0%} in "
                "expectation. So the two forms do not follow the same mean of the clients.",
            ),
        ),
    ]
