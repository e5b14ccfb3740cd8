"""The CIFAR-10 CNN of pfl-research's benchmarks (NeurIPS 2024, arXiv 2404.06430).

Two 3x3 convolutions of 32 and 64 channels, one 2x2 max-pool, a layer of 128, dropout before and
after it; Xavier-uniform weights and zero biases. On 3x32x32 with 10 classes: 1,626,442 parameters.
"""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

from fedlens.models.geometry import num_features
from fedlens.models.initial import initialise


def pfl_cnn(shape: tuple[int, int, int], num_classes: int) -> nn.Module:
    """The CIFAR-10 CNN of pfl-research's benchmarks."""
    features: dict[str, nn.Module] = {
        "conv1": nn.Conv2d(shape[0], 32, 3),
        "relu1": nn.ReLU(),
        "conv2": nn.Conv2d(32, 64, 3),
        "relu2": nn.ReLU(),
        "pool": nn.MaxPool2d(2),
    }
    head: dict[str, nn.Module] = {
        "dropout1": nn.Dropout(0.25),
        "flatten": nn.Flatten(),
        "fc1": nn.Linear(num_features("pfl-cnn", features.values(), shape), 128),
        "relu3": nn.ReLU(),
        "dropout2": nn.Dropout(0.5),
        "fc2": nn.Linear(128, num_classes),
    }
    model = nn.Sequential(OrderedDict(features | head))
    initialise(model, "glorot")
    return model
