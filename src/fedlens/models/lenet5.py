"""LeNet-5 (LeCun et al., Proceedings of the IEEE, 1998) in its usual modern form.

5x5 convolutions of 6 and 16 channels and layers of 120 and 84, with ReLU and 2x2 max-pools where
the original has tanh, learned average pools and a partly connected second convolution. LeNet-5
takes 32x32, so smaller images are padded by 2 in the first convolution. On 1x28x28 (or 1x32x32)
with 10 classes: 61,706 parameters.
"""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

from fedlens.models.geometry import num_features


def lenet5(shape: tuple[int, int, int], num_classes: int) -> nn.Module:
    """LeNet-5 with ReLU and max-pools."""
    pad = 2 if min(shape[1:]) < 32 else 0
    features: dict[str, nn.Module] = {
        "conv1": nn.Conv2d(shape[0], 6, 5, padding=pad),
        "relu1": nn.ReLU(),
        "pool1": nn.MaxPool2d(2),
        "conv2": nn.Conv2d(6, 16, 5),
        "relu2": nn.ReLU(),
        "pool2": nn.MaxPool2d(2),
    }
    head: dict[str, nn.Module] = {
        "flatten": nn.Flatten(),
        "fc1": nn.Linear(num_features("lenet5", features.values(), shape), 120),
        "relu3": nn.ReLU(),
        "fc2": nn.Linear(120, 84),
        "relu4": nn.ReLU(),
        "fc3": nn.Linear(84, num_classes),
    }
    return nn.Sequential(OrderedDict(features | head))
