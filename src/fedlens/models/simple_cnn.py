"""The net of PyTorch's CIFAR-10 tutorial, which NIID-Bench and others call simple-cnn.

5x5 convolutions of 6 and 16 channels without padding, each with a 2x2 max-pool, and layers of 120
and 84. With 10 classes: 62,006 parameters on 3x32x32, 44,426 on 1x28x28.
"""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

from fedlens.models.geometry import num_features


def simple_cnn(shape: tuple[int, int, int], num_classes: int) -> nn.Module:
    """The net of PyTorch's CIFAR-10 tutorial."""
    features: dict[str, nn.Module] = {
        "conv1": nn.Conv2d(shape[0], 6, 5),
        "relu1": nn.ReLU(),
        "pool1": nn.MaxPool2d(2),
        "conv2": nn.Conv2d(6, 16, 5),
        "relu2": nn.ReLU(),
        "pool2": nn.MaxPool2d(2),
    }
    head: dict[str, nn.Module] = {
        "flatten": nn.Flatten(),
        "fc1": nn.Linear(num_features("simple-cnn", features.values(), shape), 120),
        "relu3": nn.ReLU(),
        "fc2": nn.Linear(120, 84),
        "relu4": nn.ReLU(),
        "fc3": nn.Linear(84, num_classes),
    }
    return nn.Sequential(OrderedDict(features | head))
