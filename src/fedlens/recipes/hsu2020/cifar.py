"""The paper's experiments on CIFAR-10 and CIFAR-100: synthetic clients by a Dirichlet prior."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from fedlens.config.experiment import Clients, Evaluate, Experiment, LocalTraining, Named
from fedlens.data.augment import Augment
from fedlens.data.emd import emd_per_client
from fedlens.recipes.hsu2020.chosen import Rate, chosen_rate
from fedlens.recipes.recipe import Measured, Results, Scale
from fedlens.runs.records import Run

ALPHAS = {
    "cifar10": (100.0, 10.0, 1.0, 0.5, 0.2, 0.1, 0.05, 0.0),
    "cifar100": (1000.0, 100.0, 10.0, 5.0, 2.0, 1.0, 0.5, 0.0),
}
ROUNDS = {"cifar10": 10_000, "cifar100": 20_000}
CENTRALISED = {"cifar10": 0.8616, "cifar100": 0.5521}
EPOCHS = 100  # of centralised training: our choice, the paper does not say
NO_POINT = "Such a run has no point in the figure."  # a run that diverged
EMD = {  # weighted mean EMD of the splits that the authors released
    "cifar10": {100.0: 0.2550, 1.0: 1.4386, 0.5: 1.5616, 0.1: 1.7434, 0.05: 1.7519, 0.0: 1.8},
    "cifar100": {1000.0: 0.2645, 0.5: 1.9169, 0.0: 1.98},
}


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
    steps = scale.pick(2, 40, ROUNDS[dataset])
    return Experiment(
        dataset=Named(scale.dataset(dataset)),
        model=scale.pick(Named("linear"), Named("simple-cnn"), Named("hsu-cnn")),
        rounds=steps,
        engine="sequential" if scale.name == "smoke" else "auto",
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


def lasting(results: Results, cell: str) -> Measured | None:
    """A cell's final accuracy; None if one of its runs diverged.

    The accuracy before divergence does not count for a setting that diverges.
    """
    return results.final(cell) if results.diverged(cell) is None else None


def stand_in(scale: Scale) -> str:
    words = [scale.instead("cifar10")]
    if scale.name == "small":
        words.append(
            "A small CNN at five times the learning rate, 40 rounds in the place of 10,000, and "
            "CIFAR-10 only."
        )
    if scale.name == "paper":
        if "cifar100" not in datasets(scale):
            where = "among these records" if scale.recorded else "on this machine"
            words.append(f"CIFAR-100 is left out: it is not {where}.")
        words.append(
            "Images are cropped and mirrored at random, which the paper does not say: without it "
            "its centralised accuracy is out of reach. How long centralised training lasts is not "
            f"said either: {EPOCHS} epochs here."
        )
    return " ".join(filter(None, words))


def client_emds(run: Run) -> list[float]:
    """The EMD of each client of a run from the population."""
    assert run.partition is not None
    found: list[float] = emd_per_client(torch.tensor(run.partition["label_counts"])).tolist()
    return found
