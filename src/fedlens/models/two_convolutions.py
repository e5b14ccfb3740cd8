"""The common structure of five published nets: two convolutions with pools, and linear layers."""

from __future__ import annotations

from collections import OrderedDict
from itertools import pairwise

from torch import nn

from fedlens.models.geometry import num_features


def two_convolutions(
    name: str,
    shape: tuple[int, int, int],
    num_classes: int,
    *,
    channels: tuple[int, int],
    hidden: tuple[int, ...],
    padding: tuple[int, int] = (0, 0),
    pool_padding: int = 0,
) -> nn.Sequential:
    """5x5 convolutions of these channels, each with a 2x2 max-pool, and layers of these widths.

    A ReLU follows each of them except the last. `name` is the model's name in the error for images
    that are too small.
    """
    features: dict[str, nn.Module] = {
        "conv1": nn.Conv2d(shape[0], channels[0], 5, padding=padding[0]),
        "relu1": nn.ReLU(),
        "pool1": nn.MaxPool2d(2, padding=pool_padding),
        "conv2": nn.Conv2d(channels[0], channels[1], 5, padding=padding[1]),
        "relu2": nn.ReLU(),
        "pool2": nn.MaxPool2d(2, padding=pool_padding),
    }
    head: dict[str, nn.Module] = {"flatten": nn.Flatten()}
    widths = num_features(name, features.values(), shape), *hidden, num_classes
    for number, (inputs, outputs) in enumerate(pairwise(widths), 1):
        head[f"fc{number}"] = nn.Linear(inputs, outputs)
        if number <= len(hidden):
            head[f"relu{number + 2}"] = nn.ReLU()
    return nn.Sequential(OrderedDict(features | head))
