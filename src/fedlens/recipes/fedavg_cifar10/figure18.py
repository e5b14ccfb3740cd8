"""Figure 18: clients a round, heterogeneity and accuracy."""

from __future__ import annotations

from collections.abc import Sequence

from fedlens.recipes.fedavg_cifar10.figure14 import COHORTS
from fedlens.recipes.fedavg_cifar10.figure17 import SIZES
from fedlens.recipes.fedavg_cifar10.setting import RULES, experiment, lambda_note, sizes, stand_in
from fedlens.recipes.recipe import Recipe, Results, Scale
from fedlens.report.blocks import Bars, Block, Curves, Line, Series, Table, Text
from fedlens.report.numbers import NONE
from fedlens.runs.records import Run


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
        keeps=("clients",),
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
            f"round it is drawn with probability C/10, so often in {rounds} rounds.",
            header=("clients a round", "probability", "expected rounds", "standard deviation"),
            rows=[
                [c, f"{c / 10:.1f}", f"{rounds * c / 10:.1f}", f"{_deviation(rounds, c / 10):.1f}"]
                for c in COHORTS
            ],
        ),
        drawn(results),
        how_often(results),
        Text(
            title="One run says little here",
            paragraphs=(
                "At the high level the accuracy after the last round depends on how often the "
                "large client was drawn. “Three is very good, one and five are worse” is what one "
                "seed gave; only a spread over seeds can tell.",
            ),
        ),
        lambda_note(),
    ]


def drawn(results: Results) -> Table:
    """A table, by run, of when the client with 91% of the images took part."""
    rows: list[list[str]] = []
    for cell, runs in _high(results).items():
        for run in runs:
            when, final = _took_part(run), run.final("test_accuracy")
            rows.append(
                [
                    cell,
                    str(run.manifest["seed"]),
                    NONE if when is None else f"{len(when)} of {run.num_rounds}",
                    NONE if when is None else ", ".join(map(str, when)),
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


def how_often(results: Results) -> Curves:
    """The accuracy of every run against the rounds with the client that has 91% of the images."""
    lines = []
    for cell, runs in _high(results).items():
        points = sorted(
            (len(when), final)
            for run in runs
            if (when := _took_part(run)) is not None
            and (final := run.final("test_accuracy")) is not None
        )
        lines.append(Line(cell, [x for x, _ in points], [y for _, y in points]))
    return Curves(
        title="Accuracy by how often it was drawn",
        caption="Test accuracy after the last round, a point for each seed, by the number of "
        "rounds in which the client with 91% of the images took part.",
        lines=lines,
        x_label="rounds with the largest client",
        y_label="test accuracy",
        percent=True,
    )


def _high(results: Results) -> dict[str, Sequence[Run]]:
    return {cell: runs for cell, runs in results.runs.items() if ", high, " in cell}


def _took_part(run: Run) -> list[int] | None:
    """The rounds in which the largest client trained; None if records do not list clients."""
    assert run.partition is not None
    largest = run.partition["sizes"].index(max(run.partition["sizes"]))
    if not all("clients" in record for record in run.rounds):
        return None
    return [record["round"] for record in run.rounds if largest in record["clients"]]


def _deviation(rounds: int, probability: float) -> float:
    return float((rounds * probability * (1 - probability)) ** 0.5)
