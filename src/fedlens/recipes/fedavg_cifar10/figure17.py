"""Figure 17: homogeneous against heterogeneous clients, K = 10, C = 5."""

from __future__ import annotations

from fedlens.recipes.fedavg_cifar10.setting import (
    RULES,
    Sizes,
    experiment,
    lambda_note,
    sizes,
    stand_in,
)
from fedlens.recipes.page import beside, curves
from fedlens.recipes.recipe import Recipe, Results, Scale
from fedlens.report.blocks import Block, Text

SIZES: tuple[Sizes, ...] = ("homogeneous", "low", "high")


def figure17(scale: Scale) -> Recipe:
    return Recipe(
        title="Homogeneous and heterogeneous clients",
        about="K = 10, C = 5: the report repeats Figure 16 to show its features more clearly. With "
        "ten clients its lists of proportions are whole, so every image is held by someone. Its "
        "curves are not printed as numbers.",
        cells={
            f"{name}, {how}": experiment(
                scale, rule, count=10, per_round=5, partition=sizes(how), rounds=30
            )
            for name, rule in RULES.items()
            for how in SIZES
        },
        seeds=range(scale.pick(1, 1, 3)),
        blocks=blocks,
        stand_in=stand_in(scale),
    )


def blocks(results: Results) -> list[Block]:
    shown = [
        curves(
            results,
            {f"{name}, {how}": how for how in SIZES},
            measure,
            title=f"{name}: test {what} by round",
            caption=f"The test {what} after each round, for ten clients of equal sizes, of 500 to "
            "9,500 images (low), and of 500 with one of 45,500 (high).",
            y_label=f"test {what}",
        )
        for name in RULES
        for measure, what in (("test_accuracy", "accuracy"), ("test_loss", "loss"))
    ]
    return [
        beside(
            [(cell, None, results.final(cell)) for cell in results.runs],
            title="Test accuracy after the last round, %",
            of="rule, clients",
        ),
        *shown,
        Text(
            title="What to expect",
            paragraphs=(
                "Nothing is confounded here. Under the λ rule the update of a client of 500 images "
                "counts as much as that of one of 45,500, though it has seen less; and a round "
                "without the large client is spent on few images. So curves are the less smooth "
                "the more unequal clients are. FedAvg weighs by what clients hold.",
            ),
        ),
        lambda_note(),
    ]
