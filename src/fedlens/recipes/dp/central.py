"""DP-SGD at one client that has all data, and privacy of clients, beside published accuracies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from fedlens.config.experiment import Clients, Evaluate, Experiment, LocalTraining, Named, Privacy
from fedlens.config.sections import Constants
from fedlens.recipes.page import beside, curves, note, told
from fedlens.recipes.recipe import Recipe, Results, Scale
from fedlens.report.blocks import Block, Curves, Line


@dataclass(frozen=True)
class Setting:
    """A run as it was published: `rounds` of `steps` each, of the one client."""

    published: float
    noise: float | None  # None: without privacy
    rounds: int
    steps: int
    batch_size: int
    lr: float
    clip: float = 1.0
    momentum: float = 0.0
    falls: bool = False  # lr, in the last quarter, to a twentieth

    def experiment(self, scale: Scale, dataset: str, model: str, **more: Any) -> Experiment:
        rounds = scale.pick(2, max(self.rounds // 4, 2), self.rounds)
        private = None
        if self.noise is not None:
            private = Privacy(unit="example", noise=self.noise, clip=self.clip)
        return Experiment(
            dataset=Named(scale.dataset(dataset)),
            model=Named(scale.pick("linear", model, model)),
            rounds=rounds,
            engine=scale.engine,
            clients=Clients(count=1, partition=Named("iid")),
            local=LocalTraining(
                steps=scale.pick(2, max(self.steps // 5, 1), self.steps),
                batch_size=self.batch_size,
                lr=_falling(self.lr, rounds) if self.falls else self.lr,
                momentum=self.momentum,
                reset=False,
            ),
            evaluate=Evaluate(every=max(rounds // 20, 1)),
            privacy=private,
            **more,
        )


def _falling(lr: float, rounds: int) -> Named:
    first = 3 * rounds // 4
    shares = [1 - 0.95 * (k + 1) / (rounds - first) for k in range(rounds - first)]
    values = [lr, *(lr * share for share in shares)]
    return Named("piecewise", {"values": values, "at": [*range(max(first, 1), rounds)]})


CIFAR = {  # 20 epochs of 100 steps
    f"z {noise:g}": Setting(accuracy, noise, 80, 25, 500, lr, falls=True)
    for noise, accuracy, lr in (
        (1.16, 0.585, 0.5),
        (0.807, 0.620, 1.0),
        (0.715, 0.637, 1.0),
        (0.61, 0.654, 1.0),
        (0.559, 0.662, 1.0),
        (0.498, 0.670, 1.0),
        (0.0, 0.775, 1.0),
    )
}
FASHION = {"z 2.15": Setting(0.860, 2.15, 39, 30, 2048, 4.0, 0.1, 0.9)}  # 1,170 of 1,172 steps
MNIST = {
    "Tramèr and Boneh, z 1.23": Setting(0.981, 1.23, 40, 117, 512, 0.5, 0.1, 0.9),
    "Opacus, without privacy": Setting(0.9894, None, 20, 250, 240, 0.1),
    "Opacus, z 0.7": Setting(0.9709, 0.7, 45, 250, 240, 0.25, 1.5),
    "Opacus, z 1.1": Setting(0.9678, 1.1, 60, 250, 240, 0.15),
    "Opacus, z 1.3": Setting(0.9463, 1.3, 15, 250, 240, 0.25, 1.5),
}


def cifar10_dp_sgd(scale: Scale) -> Recipe:
    """Accuracy over ε on CIFAR-10."""
    half = Constants(mean=0.5, deviation=0.5)
    cells = {
        cell: one.experiment(scale, "cifar10", "tanh-vgg", normalise=half)
        for cell, one in CIFAR.items()
    }
    return _recipe(scale, "cifar10-dp-sgd", cells, CIFAR, seeds=12)


def fashion_mnist(scale: Scale) -> Recipe:
    """A small tanh net on Fashion-MNIST."""
    cells = {
        cell: one.experiment(scale, "fashion-mnist", "tanh-cnn") for cell, one in FASHION.items()
    }
    return _recipe(scale, "fashion-mnist", cells, FASHION, seeds=10)


def mnist(scale: Scale) -> Recipe:
    """Two small nets on MNIST."""
    cells = {
        cell: one.experiment(
            scale, "mnist", "opacus-cnn" if cell.startswith("Opacus") else "tanh-cnn"
        )
        for cell, one in MNIST.items()
    }
    return _recipe(scale, "mnist", cells, MNIST, seeds=10)


def pfl_cifar10(scale: Scale) -> Recipe:
    """Privacy of clients, with the noise of a larger federation."""
    private = Privacy(epsilon=2.0, delta=1e-6, clip=0.4, noise_cohort=1000, population=1_000_000)
    plain = Experiment(
        dataset=Named(scale.dataset("cifar10")),
        model=Named(scale.pick("linear", "pfl-cnn", "pfl-cnn")),
        rounds=scale.pick(2, 150, 1500),
        engine=scale.engine,
        clients=Clients(count=1000, per_round=50, partition=Named("iid")),
        local=LocalTraining(epochs=1, batch_size=10, lr=0.1),
        evaluate=Evaluate(every=scale.pick(1, 10, 50)),
    )
    cells = {"without privacy": plain, "ε 2": replace(plain, privacy=private)}
    return _recipe(scale, "pfl-cifar10", cells, {}, seeds=3)


def _recipe(
    scale: Scale,
    item: str,
    cells: Mapping[str, Experiment],
    settings: Mapping[str, Setting],
    seeds: int,
) -> Recipe:
    def blocks(results: Results) -> list[Block]:
        rows = [
            (
                _with_epsilon(results, cell),
                settings[cell].published if cell in settings else None,
                results.final(cell),
            )
            for cell in cells
        ]
        table = beside(
            rows,
            title="Test accuracy after the last step, %",
            caption="z is the noise on the sum of a batch, in clips; ε is for δ = 1e-5, or as the "
            "experiment says.",
            of="noise",
        )
        by_round = curves(
            results,
            title="Test accuracy by round",
            caption="A round is some steps of the one client, or of the cohort.",
        )
        by_epsilon = [_by_epsilon(results, settings)] if len(settings) > 1 else []
        return [*by_epsilon, table, by_round, note(__name__, "Text of the papers and what is run")]

    return Recipe(
        *told(__name__, item),
        cells=cells,
        seeds=range(scale.pick(1, 1, seeds)),
        blocks=blocks,
        stand_in=_stand_in(scale, item),
        num_classes={"cifar10": 10, "fashion-mnist": 10, "mnist": 10},
    )


def _stand_in(scale: Scale, item: str) -> str:
    dataset = "cifar10" if "cifar10" in item else item
    fewer = "A quarter of the rounds (a tenth with clients), of a fifth of the steps."
    return " ".join(filter(None, [scale.instead(dataset), fewer * (scale.name == "small")]))


def _with_epsilon(results: Results, cell: str) -> str:
    spent = results.final(cell, "epsilon")
    return cell if spent is None or "ε" in cell else f"{cell} (ε {spent.mean:.2f})"


def _by_epsilon(results: Results, settings: Mapping[str, Setting]) -> Curves:
    """Ours and the published accuracies over the ε that was spent."""
    found = sorted(
        (spent.mean, ours.mean, settings[cell].published)
        for cell in settings
        if (spent := results.final(cell, "epsilon")) and (ours := results.final(cell))
    )
    x = [spent for spent, *_ in found]
    return Curves(
        title="Accuracy by ε",
        caption="Runs without noise have no ε.",
        lines=[
            Line("ours", x, [ours for _, ours, _ in found]),
            Line("published", x, [published for *_, published in found], style="dashed"),
        ],
        x_label="ε",
        y_label="test accuracy",
        percent=True,
    )
