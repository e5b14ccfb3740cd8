"""A few images of every class, as in the first figure of most papers."""

from __future__ import annotations

import torch

from fedlens.core.federation import Dataset
from fedlens.data import DATASETS, Source
from fedlens.recipes.page import beside, recipe
from fedlens.recipes.recipe import Recipe, Results, Scale
from fedlens.report.blocks import Block, Image, Samples


def samples(module: str, scale: Scale, wanted: str, each: int, published: dict[str, int]) -> Recipe:
    """The recipe that shows samples of a data set, `each` per class, and its published sizes."""
    used = scale.dataset(wanted)

    def blocks(results: Results) -> list[Block]:
        dataset = DATASETS[used](Source(scale.data))
        found = len(dataset.train), len(dataset.test), dataset.num_classes
        names = enumerate(dataset.classes)
        return [
            Samples(
                title=f"{used}: {each} of each class",
                caption="The first training images of every class.",
                rows=[(name, _first(dataset, label, each)) for label, name in names],
            ),
            beside(
                [(name, n, ours) for (name, n), ours in zip(published.items(), found, strict=True)],
                title="How many there are",
                percent=False,
                digits=0,
            ),
        ]

    return recipe(module, scale, "samples", blocks, on=[wanted], seeds=(1, 1, 1))


def _first(dataset: Dataset, label: int, count: int) -> list[Image]:
    index = torch.nonzero(dataset.train.labels == label)[:count, 0]
    images = dataset.train.read(index).permute(0, 2, 3, 1).numpy()  # [count, H, W, channels]
    return [image[..., 0] if image.shape[2] == 1 else image for image in images]
