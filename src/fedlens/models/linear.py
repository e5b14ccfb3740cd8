"""Softmax regression: one linear layer on the pixels.

The problem is convex, so the limit that an algorithm should reach is known. With 10 classes: 7,850
parameters on 1x28x28, 30,730 on 3x32x32.
"""

from __future__ import annotations

from collections import OrderedDict

from torch import nn


def linear(shape: tuple[int, int, int], num_classes: int) -> nn.Module:
    """Softmax regression."""
    channels, height, width = shape
    fc = nn.Linear(channels * height * width, num_classes)
    layers: dict[str, nn.Module] = {"flatten": nn.Flatten(), "fc": fc}
    return nn.Sequential(OrderedDict(layers))
