"""What the items of the FedAvg report on CIFAR-10 share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from fedlens.config.experiment import Clients, Experiment, LocalTraining, Named
from fedlens.core.federation import Examples, Holdings
from fedlens.data.augment import Augment
from fedlens.data.partitions.dealing import proportions
from fedlens.recipes.page import beside, curves, note, sentences, told
from fedlens.recipes.recipe import Measured, Recipe, Results, Scale
from fedlens.report.blocks import Block, Curves

LAMBDA = Named("lambda-sum", {"lambda": 0.1})
FEDAVG = Named("fedavg")
RULES = {"λ rule": LAMBDA, "FedAvg": FEDAVG}
"""The rule in the report's code, and the one in its text."""

LAMBDA_NOTE = note(__name__, "The λ rule is not FedAvg")
MEASURES = {"test_accuracy": "accuracy", "test_loss": "loss"}

Sizes = Literal["homogeneous", "low", "high"]


def sizes(how: Sizes, mode: Literal["truncate", "renormalise"] = "renormalise") -> Named:
    """A partition in the report's proportions, taken in stored order as in its code."""
    return Named("proportions", {"sizes": how, "mode": mode, "order": "stored"})


def equal_part(
    examples: Examples,
    num_classes: int,
    num_clients: int,
    rng: np.random.Generator,
    *,
    share: float,
) -> Holdings:
    """Equal clients that together hold only a share of the examples."""
    count = int(len(examples) * share)
    first = Examples(examples.images[:count], examples.labels[:count])
    return proportions(first, num_classes, num_clients, rng, order="stored")


def part(share: float) -> Named:
    return Named(f"{__name__}:equal_part", {"share": share})


def experiment(
    scale: Scale,
    algorithm: Named = LAMBDA,
    *,
    count: int = 5,
    per_round: int = 3,
    partition: Named | None = None,
    rounds: int = 20,
    model: Named | None = None,
    outputs: int | None = 1000,
    lr: float | None = None,
    scratch: bool = False,
) -> Experiment:
    """The report's setting; values that it omits are from the book whose code it uses."""
    model = model or scale.pick(Named("linear"), Named("simple-cnn"), Named("resnet18"))
    partition = partition or sizes("homogeneous")
    return Experiment(
        dataset=Named(scale.dataset("cifar10")),
        model=model,
        rounds=scale.pick(2, rounds // 2, rounds),
        engine=scale.engine,
        augment=scale.pick(Augment(), Augment(), Augment(crop=4, flip=True)),
        outputs=outputs and scale.pick(20, outputs, outputs),
        weights=pretrained(scale) if model.name == "resnet18" and not scratch else None,
        clients=Clients(count=count, per_round=per_round, partition=partition),
        local=LocalTraining(
            epochs=scale.pick(1, 1, 3),
            batch_size=scale.pick(256, 32, 32),
            lr=lr or scale.pick(0.05, 0.05, 0.001),
            momentum=0.0001,
        ),
        algorithm=(algorithm,),
    )


def pretrained(scale: Scale) -> str | None:
    """torchvision's ImageNet weights of ResNet-18, if the file is in a folder of data sets."""
    return scale.weights("resnet18") if scale.name == "paper" else None


def stand_in(scale: Scale) -> str:
    """A text about what differs from the report."""
    words = [scale.instead("cifar10")]
    if scale.name == "small":
        words.append(sentences(__name__, "Small"))
    if scale.name == "paper":
        words.append(sentences(__name__, "Augmentation"))
        weights = pretrained(scale)
        from_scratch = sentences(__name__, "Without weights")
        words.append(f"ResNet-18 starts from {weights}." if weights else from_scratch)
    return " ".join(filter(None, words))


def recipe(scale: Scale, item: str, *, seeds: int = 3, **more: Any) -> Recipe:
    """The recipe of an item, with this many seeds at the paper's scale."""
    of_scale = range(scale.pick(1, 1, seeds))
    return Recipe(*told(__name__, item), seeds=of_scale, stand_in=stand_in(scale), **more)


def by_round(
    results: Results,
    cells: Mapping[str, str] | Sequence[str] = (),
    measure: str = "test_accuracy",
    title: str = "Test {} by round",
    **more: Any,
) -> Curves:
    return curves(results, cells, measure, title=title.format(MEASURES[measure]), **more)


def last_round(
    results: Results, published: Mapping[str, tuple[float, float]], of: str = "run"
) -> list[Block]:
    """Final accuracy and loss of every cell, with the published ones."""

    def ends(measure: str, place: int) -> list[tuple[str, float | None, Measured | None]]:
        theirs = {cell: numbers[place] for cell, numbers in published.items()}
        return [(cell, theirs.get(cell), results.final(cell, measure)) for cell in results.runs]

    accuracy, loss = (f"Test {what} after the last round" for what in ("accuracy", "loss"))
    return [
        beside(ends("test_accuracy", 0), title=f"{accuracy}, %", of=of),
        beside(ends("test_loss", 1), title=loss, of=of, percent=False, digits=3),
    ]
