"""DP-SGD at one client that has all data, and privacy of clients, beside published accuracies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fedlens.config.experiment import Clients, Evaluate, Experiment, LocalTraining, Named, Privacy
from fedlens.recipes.page import beside, curves, note, published, recipe
from fedlens.recipes.recipe import Recipe, Results, Scale
from fedlens.report.blocks import Block, Curves, Line

PUBLISHED = published(__name__)


def cifar10_dp_sgd(scale: Scale) -> Recipe:
    """Accuracy over ε on CIFAR-10."""
    half = {"normalise": {"mean": 0.5, "deviation": 0.5}}
    return _central(scale, "cifar10-dp-sgd", "cifar10", "tanh-vgg", seeds=12, **half)


def fashion_mnist(scale: Scale) -> Recipe:
    """A small tanh net on Fashion-MNIST."""
    return _central(scale, "fashion-mnist", "fashion-mnist", "tanh-cnn", seeds=10)


def mnist(scale: Scale) -> Recipe:
    """Two small nets on MNIST."""
    return _central(scale, "mnist", "mnist", "tanh-cnn", seeds=10)


def pfl_cifar10(scale: Scale) -> Recipe:
    """Privacy of clients, with the noise of a larger federation."""
    private = Privacy(epsilon=2.0, delta=1e-6, clip=0.4, noise_cohort=1000, population=1_000_000)
    plain = scale.experiment(
        "cifar10",
        ("linear", "pfl-cnn", "pfl-cnn"),
        (2, 150, 1500),
        clients=Clients(count=1000, per_round=50, partition=Named("iid")),
        local=LocalTraining(epochs=1, batch_size=10, lr=0.1),
        evaluate=Evaluate(every=scale.pick(1, 10, 50)),
    )
    cells = {"without privacy": plain, "ε 2": replace(plain, privacy=private)}
    return _recipe(scale, "pfl-cifar10", "cifar10", cells, seeds=3)


def _central(
    scale: Scale, item: str, dataset: str, model: str, *, seeds: int, **more: Any
) -> Recipe:
    """The published runs on a data set, each by one client that has all of it."""
    cells = {}
    for cell, given in PUBLISHED[dataset].items():
        rounds = scale.pick(2, max(given["rounds"] // 4, 2), given["rounds"])
        local = given["local"]
        steps = scale.pick(2, max(local["steps"] // 5, 1), local["steps"])
        lr = _falling(local["lr"], rounds) if dataset == "cifar10" else local["lr"]
        private = given.get("privacy")
        own = "opacus-cnn" if cell.startswith("Opacus") else model
        cells[cell] = scale.experiment(
            dataset,
            ("linear", own, own),
            (rounds, rounds, rounds),
            clients=Clients(count=1, partition=Named("iid")),
            local=LocalTraining(**{**local, "steps": steps, "lr": lr, "reset": False}),
            evaluate=Evaluate(every=max(rounds // 20, 1)),
            privacy=private and Privacy(unit="example", **private),
            **more,
        )
    return _recipe(scale, item, dataset, cells, seeds)


def _falling(lr: float, rounds: int) -> Named:
    """In the last quarter of the rounds to a twentieth."""
    first = 3 * rounds // 4
    shares = [1 - 0.95 * (k + 1) / (rounds - first) for k in range(rounds - first)]
    values = [lr, *(lr * share for share in shares)]
    return Named("piecewise", {"values": values, "at": [*range(max(first, 1), rounds)]})


def _recipe(
    scale: Scale, item: str, dataset: str, cells: Mapping[str, Experiment], seeds: int
) -> Recipe:
    theirs = {cell: PUBLISHED[dataset].get(cell, {}).get("accuracy") for cell in cells}

    def blocks(results: Results) -> list[Block]:
        ends = {cell: results.final(cell) for cell in cells}
        spent = {cell: one.mean for cell in cells if (one := results.final(cell, "epsilon"))}
        named = {c: f"{c} (ε {spent[c]:.2f})" if c in spent and "ε" not in c else c for c in cells}
        found = sorted(
            (spent[cell], end.mean, theirs[cell])
            for cell, end in ends.items()
            if end and cell in spent
        )
        x, ours, published = ([row[side] for row in found] for side in range(3))
        by_epsilon = Curves(
            title="Accuracy by ε",
            lines=[Line("ours", x, ours), Line("published", x, published, style="dashed")],
            x_label="ε",
            y_label="test accuracy",
            percent=True,
        )
        return [
            *([by_epsilon] if any(theirs.values()) and len(cells) > 1 else []),
            beside(
                [(named[cell], theirs[cell], end) for cell, end in ends.items()],
                title="Test accuracy after the last step, %",
                of="noise",
            ),
            curves(results, title="Test accuracy by round"),
            note(__name__, "Text of the papers and what is run"),
        ]

    return recipe(
        __name__,
        scale,
        item,
        blocks,
        cells=cells,
        on=[dataset],
        seeds=(1, 1, seeds),
        small="A quarter of the rounds (a tenth with clients), of a fifth of the steps.",
    )
