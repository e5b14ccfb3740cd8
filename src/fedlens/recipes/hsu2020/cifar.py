"""The paper's experiments on CIFAR-10 and CIFAR-100: synthetic clients by a Dirichlet prior.

Figure 4 and centralised training have the settings that a pilot picked: those in chosen.json,
beside this file.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

from fedlens.config.experiment import Clients, Evaluate, Experiment, LocalTraining, Named
from fedlens.data.augment import Augment
from fedlens.recipes.hsu2020.setting import PUBLISHED
from fedlens.recipes.page import sentences, told
from fedlens.recipes.recipe import Recipe, Results, Scale

ALPHAS = {
    "cifar10": (100.0, 10.0, 1.0, 0.5, 0.2, 0.1, 0.05, 0.0),
    "cifar100": (1000.0, 100.0, 10.0, 5.0, 2.0, 1.0, 0.5, 0.0),
}
ROUNDS = {"cifar10": 10_000, "cifar100": 20_000}
EPOCHS = 100  # of centralised training: our choice, see notes.md
NO_POINT = "Such a run has no point in the figure."  # a run that diverged
CHOSEN = "chosen.json"
CENTRALISED = "centralised"  # the key there of the choice for centralised training


def published_emd(dataset: str, alpha: float) -> float | None:
    """The weighted mean EMD of the splits that the authors released."""
    found: float | None = PUBLISHED[dataset]["emd"].get(f"{alpha:g}")
    return found


class Point(NamedTuple):
    """The clients' learning rate and the server's momentum."""

    lr: float
    momentum: float


class Rate(NamedTuple):
    """The learning rate of centralised training, and its schedule: constant, or cosine to 0."""

    lr: float
    schedule: str = "constant"


class Setting(NamedTuple):
    """A point of Figure 8's grid: an effective learning rate η / (1 − β), and 1 − β."""

    rate: float
    left: float

    def __str__(self) -> str:
        return f"η_eff {self.rate:.2g}, 1-β {self.left:.2g}"

    @property
    def point(self) -> Point:
        return Point(self.rate * self.left, 1 - self.left)


def rates(scale: Scale) -> tuple[float, ...]:
    """The effective learning rates η / (1 − β) of the grid."""
    return scale.pick((0.01, 0.1), (0.01, 0.1, 1.0), tuple(10 ** (-3 + i / 2) for i in range(7)))


def momenta(scale: Scale) -> tuple[float, ...]:
    """The values of 1 − β of the grid."""
    return scale.pick((0.1, 1.0), (0.1, 0.3, 1.0), tuple(10 ** (-2.5 + i / 2) for i in range(6)))


def grid(scale: Scale) -> list[Setting]:
    """The grid of Figure 8, by learning rate and then by momentum."""
    return list(itertools.starmap(Setting, itertools.product(rates(scale), momenta(scale))))


@cache
def _chosen() -> dict[str, dict[str, Any]]:
    found: dict[str, Any] = json.loads((files(__package__) / CHOSEN).read_text(encoding="utf-8"))
    return found


def chosen(dataset: str, alpha: float, base: str) -> Point | None:
    """The pilot's choice for a data set, a concentration and FedAvg or FedAvgM."""
    found = _chosen().get(dataset, {}).get(f"{alpha:g}", {}).get(base)
    return Point(*found) if found else None


def chosen_rate(dataset: str) -> Rate | None:
    """The pilot's choice for centralised training."""
    found = _chosen().get(dataset, {}).get(CENTRALISED)
    return Rate(*found) if found else None


def alphas(scale: Scale, dataset: str) -> tuple[float, ...]:
    """The concentrations at this scale: all, or some from equal clients to one class each."""
    every = ALPHAS[dataset]
    return scale.pick((every[0], 0.0), (every[0], every[2], 0.0), every)


def datasets(scale: Scale) -> tuple[str, ...]:
    """CIFAR-10 and, at the paper's scale and if it is available, CIFAR-100."""
    both = scale.name == "paper" and scale.has("cifar100")
    return ("cifar10", "cifar100") if both else ("cifar10",)


def experiment(
    scale: Scale,
    dataset: str,
    alpha: float,
    algorithm: Sequence[Named] = (),
    per_round: int = 10,
    *,
    lr: float | None = None,
    epochs: int = 1,
) -> Experiment:
    """100 clients of 500 images, whose classes are drawn with concentration α.

    The default `lr` is the paper's, 0.01, or five times that at smaller scales.
    """
    return Experiment(
        dataset=Named(scale.dataset(dataset)),
        model=scale.pick(Named("linear"), Named("simple-cnn"), Named("hsu-cnn")),
        rounds=scale.pick(2, 40, ROUNDS[dataset]),
        engine=scale.engine,
        augment=scale.pick(Augment(), Augment(), Augment(crop=4, flip=True)),
        clients=Clients(
            count=scale.pick(20, 100, 100),
            per_round=min(per_round, scale.pick(2, 10, per_round)),
            partition=Named("dirichlet", {"alpha": alpha}),
        ),
        local=LocalTraining(
            epochs=epochs,
            batch_size=scale.pick(64, 32, 64),
            lr=lr or scale.pick(0.05, 0.05, 0.01),
            weight_decay=4e-4,
        ),
        evaluate=Evaluate(every=scale.pick(1, 5, 100)),
        algorithm=tuple(algorithm),
    )


def at_point(
    scale: Scale, dataset: str, alpha: float, point: Point, per_round: int, epochs: int = 1
) -> Experiment:
    """FedAvgM with this learning rate and momentum."""
    server = Named("fedavgm", {"momentum": point.momentum})
    return experiment(scale, dataset, alpha, (server,), per_round, lr=point.lr, epochs=epochs)


def centralised(scale: Scale, dataset: str, rate: Rate | None = None) -> Experiment:
    """One client that holds all examples; a round is an epoch.

    The default `rate` is the choice of Figure 4's pilot, if any, else the clients' default.
    """
    alone = experiment(scale, dataset, 0.0)
    if rate is None and scale.name == "paper":
        rate = chosen_rate(dataset)
    lr = alone.local.lr if rate is None else rate.lr
    if rate is not None and rate.schedule != "constant":
        lr = Named(rate.schedule, {"start": rate.lr})
    return replace(
        alone,
        rounds=scale.pick(1, 8, EPOCHS),
        clients=Clients(count=1, partition=Named("iid")),
        local=replace(alone.local, lr=lr, reset=False),
        evaluate=Evaluate(every=1),
    )


def relative(results: Results, dataset: str, cell: str) -> float | None:
    """A cell's final accuracy divided by that of centralised training, if both were run.

    None if a run of the cell diverged: its accuracy before that does not count for its settings.
    """
    ends, whole = results.final(cell), results.final(f"{dataset}, centralised")
    if results.diverged(cell) is not None or not ends or not whole or not whole.mean:
        return None
    return ends.mean / whole.mean


def stand_in(scale: Scale) -> str:
    words = [scale.instead("cifar10")]
    if scale.name == "small":
        words.append(sentences(__name__, "Small"))
    if scale.name == "paper":
        if "cifar100" not in datasets(scale):
            where = "among these records" if scale.recorded else "on this machine"
            words.append(f"CIFAR-100 is left out: it is not {where}.")
        words.append(sentences(__name__, "Augmentation"))
    return " ".join(filter(None, words))


def recipe(scale: Scale, item: str, **more: Any) -> Recipe:
    return Recipe(*told(__name__, item), stand_in=stand_in(scale), **more)
