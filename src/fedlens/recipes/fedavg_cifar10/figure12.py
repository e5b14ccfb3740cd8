"""Figure 12: accuracy and loss of federated training, by rounds."""

from __future__ import annotations

from fedlens.recipes.fedavg_cifar10.headline import at_the_end
from fedlens.recipes.fedavg_cifar10.setting import RULES, experiment, lambda_note, stand_in
from fedlens.recipes.page import curves
from fedlens.recipes.recipe import Recipe, Results, Scale
from fedlens.report.blocks import Block

BOOK = (
    0.03, 0.26, 0.44, 0.50, 0.54, 0.57, 0.59, 0.60, 0.61, 0.625,
    0.63, 0.64, 0.65, 0.655, 0.665, 0.67, 0.675, 0.68, 0.683, 0.687,
)  # fmt: skip
"""The curve in the book whose code the report uses: ten clients, five per round (read off it)."""


def figure12(scale: Scale) -> Recipe:
    return Recipe(
        title="Curves of federated training",
        about="K = 5, C = 3. The report picks 20 rounds because its curve is flat there. Its own "
        "points are not printed, apart from the last.",
        cells={name: experiment(scale, rule) for name, rule in RULES.items()},
        seeds=range(scale.pick(1, 1, 3)),
        blocks=blocks,
        stand_in=stand_in(scale),
    )


def blocks(results: Results) -> list[Block]:
    rounds = max(run.num_rounds for runs in results.runs.values() for run in runs)
    return [
        curves(
            results,
            list(RULES),
            title="Test accuracy by round",
            caption="Accuracy on the test images after each round. Broken: the book whose code "
            "the report has, with ten clients, five a round, read off its figure.",
            published={"the book, K = 10, C = 5": BOOK[:rounds]},
            y_label="test accuracy",
        ),
        curves(
            results,
            list(RULES),
            "test_loss",
            title="Test loss by round",
            caption="Mean cross-entropy on the test images after each round.",
            y_label="test loss",
        ),
        *at_the_end(results, "λ rule"),
        lambda_note(),
    ]
