"""A data set so small that a run on it takes no time."""

import torch

import fedlens as fl


def toy(count: int = 48, side: int = 4) -> fl.Dataset:
    rng = torch.Generator().manual_seed(0)
    labels = torch.arange(count) % 3
    images = torch.randn(count, 1, side, side, generator=rng) + labels.view(-1, 1, 1, 1)
    part = fl.Examples(images, labels)
    return fl.Dataset("toy", part, part, ("a", "b", "c"))
