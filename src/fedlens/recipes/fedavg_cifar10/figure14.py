"""Figure 14: clients a round against accuracy, homogeneous clients."""

from __future__ import annotations

from fedlens.recipes.fedavg_cifar10.setting import RULES, experiment, lambda_note, stand_in
from fedlens.recipes.recipe import Recipe, Results, Scale
from fedlens.report.blocks import Bars, Block, Series, Table
from fedlens.report.numbers import NONE, signed_points

COHORTS = (1, 3, 5)


def figure14(scale: Scale) -> Recipe:
    return Recipe(
        title="Clients a round against accuracy",
        about="Ten equal clients; one, three or five take part in a round. The report's bars rise "
        "with their number (the heights are not printed in the text we have; that there are ten "
        "clients in all is inferred). Under its λ rule more clients are also a longer step of the "
        "server; under FedAvg they are not.",
        cells={
            f"{name}, {c} a round": experiment(scale, rule, count=10, per_round=c)
            for name, rule in RULES.items()
            for c in COHORTS
        },
        seeds=range(scale.pick(1, 1, 5)),
        blocks=blocks,
        stand_in=stand_in(scale),
    )


def blocks(results: Results) -> list[Block]:
    series, gains = [], []
    for name in RULES:
        found = [results.final(f"{name}, {c} a round") for c in COHORTS]
        series.append(Series(name, [f and f.mean for f in found], [f and f.std for f in found]))
        one, *more = found
        above = [signed_points(f.mean - one.mean) if f and one else NONE for f in more]
        gains.append([name, *above])
    return [
        Bars(
            title="Client versus accuracy",
            caption="Test accuracy after the last round, by the number of clients that take part "
            "in a round.",
            groups=["1 client a round", *(f"{c} clients a round" for c in COHORTS[1:])],
            series=series,
            y_label="test accuracy",
            percent=True,
            digits=2,
        ),
        Table(
            title="What more clients a round are worth",
            caption="Points of test accuracy above one client a round. The part of the rise that "
            "is there under the λ rule and not under FedAvg comes from the longer step.",
            header=("rule", *(f"{c} a round" for c in COHORTS[1:])),
            rows=gains,
        ),
        lambda_note(),
    ]
