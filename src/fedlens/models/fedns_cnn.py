"""The Fashion-MNIST CNN of FedNS (Zhuo and Li, 2021, arXiv 2101.07995).

Two 5x5 convolutions of 32 and 64 channels, each with a 2x2 max-pool, and layers of 1024 and 256.
The paper does not state the padding. On 1x28x28 with 10 classes: 3,529,354 parameters with
`same`, 1,366,666 with `valid`. Read literally it puts a ReLU after the last layer, too; that is
left out, since logits may be negative, unless `relu_on_logits` is true.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Literal

from torch import nn

from fedlens.models.geometry import num_features


def fedns_cnn(
    shape: tuple[int, int, int],
    num_classes: int,
    *,
    padding: Literal["same", "valid"] = "same",
    relu_on_logits: bool = False,
) -> nn.Module:
    """The Fashion-MNIST CNN of FedNS."""
    pad = 2 if padding == "same" else 0
    features: dict[str, nn.Module] = {
        "conv1": nn.Conv2d(shape[0], 32, 5, padding=pad),
        "relu1": nn.ReLU(),
        "pool1": nn.MaxPool2d(2),
        "conv2": nn.Conv2d(32, 64, 5, padding=pad),
        "relu2": nn.ReLU(),
        "pool2": nn.MaxPool2d(2),
    }
    head: dict[str, nn.Module] = {
        "flatten": nn.Flatten(),
        "fc1": nn.Linear(num_features("fedns-cnn", features.values(), shape), 1024),
        "relu3": nn.ReLU(),
        "fc2": nn.Linear(1024, 256),
        "relu4": nn.ReLU(),
        "fc3": nn.Linear(256, num_classes),
    }
    if relu_on_logits:
        head["relu5"] = nn.ReLU()
    return nn.Sequential(OrderedDict(features | head))
