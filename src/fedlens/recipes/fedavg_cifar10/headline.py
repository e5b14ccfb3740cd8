"""The headline run, section 3.1 and Figure 11: five clients, three a round, 20 rounds."""

from __future__ import annotations

from fedlens.recipes.fedavg_cifar10.setting import (
    FEDAVG,
    LAMBDA,
    experiment,
    lambda_note,
    stand_in,
)
from fedlens.recipes.page import beside, curves
from fedlens.recipes.recipe import Measured, Recipe, Results, Scale
from fedlens.report.blocks import Block

AS_PUBLISHED = "λ rule, 1000 outputs"
ACCURACY, LOSS = 0.7151, 0.828486


def headline(scale: Scale) -> Recipe:
    return Recipe(
        title="The headline run on CIFAR-10",
        about="Five clients of 10,000 images, three a round, three local epochs of 32, 20 rounds: "
        "71.51%. As the report's code has it, with a head of 1,000 outputs and the λ rule, and as "
        "its text has it, with FedAvg.",
        cells={
            AS_PUBLISHED: experiment(scale, LAMBDA),
            "FedAvg, 1000 outputs": experiment(scale, FEDAVG),
            "FedAvg, 10 outputs": experiment(scale, FEDAVG, outputs=None),
        },
        seeds=range(scale.pick(1, 1, 3)),
        blocks=blocks,
        stand_in=stand_in(scale),
    )


def blocks(results: Results) -> list[Block]:
    return [
        *at_the_end(results, AS_PUBLISHED),
        curves(
            results,
            list(results.runs),
            title="Test accuracy by round",
            caption="Accuracy on the test images after each round.",
            y_label="test accuracy",
        ),
        lambda_note(),
    ]


def at_the_end(results: Results, as_published: str) -> list[Block]:
    """Final accuracy and loss of every cell; the cell `as_published` beside the report's."""

    def rows(measure: str, theirs: float) -> list[tuple[str, float | None, Measured | None]]:
        return [
            (cell, theirs if cell == as_published else None, results.final(cell, measure))
            for cell in results.runs
        ]

    return [
        beside(
            rows("test_accuracy", ACCURACY), title="Test accuracy after the last round, %", of="run"
        ),
        beside(
            rows("test_loss", LOSS),
            title="Test loss after the last round",
            of="run",
            percent=False,
            digits=3,
        ),
    ]
