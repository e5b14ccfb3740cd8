"""Figure 10: classes a client, for the Dirichlet splits of CIFAR-10 and CIFAR-100."""

from __future__ import annotations

import torch

from fedlens.config.experiment import Named
from fedlens.core.federation import Dataset, Examples
from fedlens.data.emd import emd
from fedlens.recipes.hsu2020.cifar import ALPHAS, EMD
from fedlens.recipes.hsu2020.populations import draws, num_classes
from fedlens.recipes.hsu2020.setting import Population
from fedlens.recipes.page import beside
from fedlens.recipes.recipe import Measured, Recipe, Results, Scale
from fedlens.report.blocks import Block, Curves, Line

CLASSES = {"cifar10": 10, "cifar100": 100}
IMAGES = 50_000  # training images, equally many per class


def figure10(scale: Scale) -> Recipe:
    return Recipe(
        title="Classes a client",
        about="How many classes each of 100 clients has, for every concentration α of the paper, "
        "and how unalike that makes them. Nothing is trained, and no images are needed: both sets "
        "have as many of every class, which is all that these splits go by.",
        blocks=blocks,
    )


def blocks(results: Results) -> list[Block]:
    scale = results.scale
    seeds = range(scale.pick(2, 10, 10))
    shown: list[Block] = []
    for name in scale.pick(("cifar10",), tuple(ALPHAS), tuple(ALPHAS)):
        dataset, used, model = _labels(name), Named(name), Named("linear")
        splits = {
            alpha: draws(
                dataset,
                Population(name, name, used, model, Named("dirichlet", {"alpha": alpha}), 100),
                seeds,
            )
            for alpha in ALPHAS[name]
        }
        shown += [
            Curves(
                title=f"{name}: classes a client",
                caption="Each line is one split; clients in order from most to least classes.",
                lines=[
                    Line(
                        f"α {alpha:g}",
                        range(1, len(first) + 1),
                        num_classes(first).sort(descending=True).values.tolist(),
                    )
                    for alpha, (first, *_) in splits.items()
                ],
                x_label="client, by rank",
                y_label="classes",
            ),
            beside(
                [
                    (f"α {alpha:g}", EMD[name].get(alpha), Measured.of([emd(c) for c in counts]))
                    for alpha, counts in splits.items()
                ],
                title=f"{name}: mean EMD",
                caption="Published: of the splits that the authors released. Ours: the mean and "
                f"the standard deviation over {len(seeds)} splits. α is theirs: a class has "
                "concentration α / L, so α = 1 on CIFAR-10 is the Dir(0.1) of others.",
                of="concentration",
                percent=False,
                digits=3,
            ),
        ]
    return shown


def _labels(name: str) -> Dataset:
    """The labels of a training set, with empty images."""
    count = CLASSES[name]
    nothing = torch.zeros(IMAGES, 1, 1, 1, dtype=torch.uint8)
    examples = Examples(nothing, torch.arange(IMAGES) % count)
    return Dataset(name, examples, examples, tuple(map(str, range(count))))
