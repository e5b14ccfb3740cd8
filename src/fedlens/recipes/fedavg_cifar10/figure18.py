"""Figure 18: clients a round, heterogeneity and accuracy."""

from __future__ import annotations

from fedlens.recipes.fedavg_cifar10.figure14 import COHORTS
from fedlens.recipes.fedavg_cifar10.figure17 import SIZES
from fedlens.recipes.fedavg_cifar10.setting import RULES, experiment, lambda_note, sizes, stand_in
from fedlens.recipes.recipe import Recipe, Results, Scale
from fedlens.report.blocks import Bars, Block, Series, Table, Text
from fedlens.report.numbers import NONE


def figure18(scale: Scale) -> Recipe:
    rules = dict(list(RULES.items())[: scale.pick(1, 1, 2)])
    return Recipe(
        title="Clients, heterogeneity and accuracy",
        about="Ten clients; one, three or five a round; equal sizes, a low and a high level of "
        "heterogeneity. The report concludes that at the high level three clients are very good "
        "and one and five are worse. It has one run each; that it has ten clients in all is "
        "inferred.",
        cells={
            f"{name}, {how}, {c} a round": experiment(
                scale, rule, count=10, per_round=c, partition=sizes(how)
            )
            for name, rule in rules.items()
            for how in SIZES
            for c in COHORTS
        },
        seeds=range(scale.pick(1, 1, 5)),
        blocks=blocks,
        stand_in=stand_in(scale),
    )


def blocks(results: Results) -> list[Block]:
    rules = list(dict.fromkeys(cell.split(", ")[0] for cell in results.runs))
    charts: list[Block] = []
    for name in rules:
        series = []
        for how in SIZES:
            found = [results.final(f"{name}, {how}, {c} a round") for c in COHORTS]
            series.append(Series(how, [f and f.mean for f in found], [f and f.std for f in found]))
        charts.append(
            Bars(
                title=f"Client versus accuracy, {name}",
                caption="Test accuracy after the last round, by the number of clients a round. "
                "Error bars are one standard deviation over seeds.",
                groups=[f"{c} a round" for c in COHORTS],
                series=series,
                y_label="test accuracy",
                percent=True,
                digits=2,
            )
        )
    rounds = max(run.num_rounds for runs in results.runs.values() for run in runs)
    return [
        *charts,
        Table(
            title="Is the client with 91% of the images drawn?",
            caption=f"At the high level one client holds 91% of all images. With C of 10 clients a "
            f"round it is drawn with probability C/10, and in so many of {rounds} rounds.",
            header=("clients a round", "probability", "expected rounds", "standard deviation"),
            rows=[
                [c, f"{c / 10:.1f}", f"{rounds * c / 10:.1f}", f"{_deviation(rounds, c / 10):.1f}"]
                for c in COHORTS
            ],
        ),
        drawn(results),
        Text(
            title="One run says little here",
            paragraphs=(
                "At the high level the accuracy after the last round depends on when the large "
                "client was last drawn. “Three is very good, one and five are worse” is what one "
                "seed gave; only a spread over seeds can tell.",
            ),
        ),
        lambda_note(),
    ]


def drawn(results: Results) -> Table:
    """When the client with 91% of the images took part, run by run."""
    rows: list[list[str]] = []
    for cell, runs in results.runs.items():
        if ", high, " not in cell:
            continue
        for run in runs:
            assert run.partition is not None
            largest = run.partition["sizes"].index(max(run.partition["sizes"]))
            known = all("clients" in record for record in run.rounds)
            when = [r["round"] for r in run.rounds if largest in r.get("clients", ())]
            final = run.final("test_accuracy")
            rows.append(
                [
                    cell,
                    str(run.manifest["seed"]),
                    f"{len(when)} of {run.num_rounds}" if known else NONE,
                    ", ".join(map(str, when)) if known else NONE,
                    NONE if final is None else f"{100 * final:.2f}",
                ]
            )
    return Table(
        title="When it was drawn",
        caption="The rounds in which the client with 91% of the images took part, and the test "
        "accuracy after the last round, in %.",
        header=("run", "seed", "rounds", "which", "accuracy"),
        rows=rows,
    )


def _deviation(rounds: int, probability: float) -> float:
    return float((rounds * probability * (1 - probability)) ** 0.5)
