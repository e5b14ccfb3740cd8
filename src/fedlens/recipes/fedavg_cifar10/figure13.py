"""Figure 13: centralised training, K = C = 1, and the claim that it takes longer."""

from __future__ import annotations

import itertools
from dataclasses import replace

from fedlens.config.experiment import Experiment, Named
from fedlens.recipes.fedavg_cifar10.setting import FEDAVG, LAMBDA, experiment, stand_in
from fedlens.recipes.page import curves, mean_of
from fedlens.recipes.recipe import Measured, Recipe, Results, Scale
from fedlens.report.blocks import Block, Curves, Table, Text

FEDERATED = "federated, λ rule"
AS_PUBLISHED = "K = C = 1, λ rule"
PROPER = "centralised"
NEAR = 0.95  # of the best accuracy: from there a run counts as converged


def figure13(scale: Scale) -> Recipe:
    return Recipe(
        title="Curves of centralised training",
        about="The report sets K = C = 1, finds that this “centralised” training needs more than "
        "25 rounds and a very long time, and concludes that federated learning is more efficient. "
        "Beside it: centralised training proper, which is the same client without the λ.",
        cells={
            FEDERATED: experiment(scale, LAMBDA),
            AS_PUBLISHED: _alone(scale, LAMBDA),
            PROPER: _kept_momentum(_alone(scale, FEDAVG)),
        },
        seeds=range(scale.pick(1, 1, 3)),
        blocks=blocks,
        stand_in=stand_in(scale),
    )


def _alone(scale: Scale, rule: Named) -> Experiment:
    return experiment(scale, rule, count=1, per_round=1, rounds=30)


def _kept_momentum(cell: Experiment) -> Experiment:
    return replace(cell, local=replace(cell.local, reset=False))


def blocks(results: Results) -> list[Block]:
    return [
        Table(
            title="What it takes",
            caption=f"Rounds and images until the test accuracy is {NEAR:.0%} of the best that the "
            "run reaches: the mean over seeds ± the standard deviation. An image counts as often "
            "as it is trained on. Each run is held to its own best: what all reach with as many "
            "images is in the figure.",
            header=("run", "final accuracy, %", "rounds", "images seen"),
            rows=[_row(results, cell) for cell in results.runs],
        ),
        curves(
            results,
            list(results.runs),
            title="Test accuracy by round",
            caption="As the report draws it. A round of K = C = 1 sees all images three times "
            "(once at smaller scales), a federated one three fifths of that.",
            y_label="test accuracy",
        ),
        curves(
            results,
            list(results.runs),
            "test_loss",
            title="Test loss by round",
            caption="Mean cross-entropy on the test images after each round.",
            y_label="test loss",
        ),
        _by_images(results),
        Text(
            title="Why “centralised” looked slow",
            paragraphs=(
                "With K = C = 1 the report's rule still multiplies the only client's update by "
                "λ = 0.1: after each round the server keeps a tenth of what was learnt and throws "
                "the rest away. Ten such rounds move about as far as one of plain training. It is "
                "the λ, and not centralised training, that needs more than 25 rounds. The wall "
                "time that the report speaks of follows: each of its centralised rounds trains on "
                "50,000 images and each federated one on 30,000, one client after another on one "
                "machine.",
            ),
        ),
    ]


def _row(results: Results, cell: str) -> list[str]:
    found = [_reached(run.rounds) for run in results.runs[cell]]
    rounds, images = map(Measured.of, zip(*found, strict=True))
    accuracy = mean_of(results.final(cell), 2, times=100)
    return [cell, accuracy, mean_of(rounds, 1), mean_of(images, 0)]


def _reached(rounds: list[dict[str, float]]) -> tuple[float, float]:
    """The round, and the images seen, at which a run first comes near its best accuracy."""
    best = max(record["test_accuracy"] for record in rounds)
    near = next(i for i, record in enumerate(rounds) if record["test_accuracy"] >= NEAR * best)
    return near + 1, _seen(rounds)[near]


def _seen(rounds: list[dict[str, float]]) -> list[float]:
    """The cumulative number of training images at the end of each round."""
    return list(itertools.accumulate(record["examples"] for record in rounds))


def _by_images(results: Results) -> Curves:
    """Curves by images seen. Clients hold equally many, so all seeds share the same x values."""
    shown = curves(
        results,
        list(results.runs),
        title="Test accuracy by images seen",
        caption="Accuracy on the test images after each round, by how many images had been trained "
        "on by then.",
        x_label="images seen, millions",
        y_label="test accuracy",
    )
    seen = {cell: _seen(runs[0].rounds) for cell, runs in results.runs.items()}
    lines = [
        replace(line, x=[seen[line.name][int(r) - 1] / 1e6 for r in line.x]) for line in shown.lines
    ]
    return replace(shown, lines=lines)
