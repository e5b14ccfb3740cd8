"""AlexNet (Krizhevsky, "One weird trick", 2014, arXiv 1404.5997), as in torchvision.

Five convolutions and layers of 4096 and 4096, for 224x224; with torchvision's names, so that its
published files load. It needs 63x63 at least: `alexnet-32` is made for smaller images. At 10
classes: 57,044,810 parameters for three channels, whatever the size.
"""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

from fedlens.models.geometry import num_features
from fedlens.network.pool import AdaptivePool


def alexnet(shape: tuple[int, int, int], num_classes: int) -> nn.Module:
    """torchvision's AlexNet."""
    features = nn.Sequential(
        nn.Conv2d(shape[0], 64, 11, stride=4, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(3, 2),
        nn.Conv2d(64, 192, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(3, 2),
        nn.Conv2d(192, 384, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(384, 256, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(256, 256, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(3, 2),
    )
    num_features("alexnet", features, shape)  # raises an error if images are too small
    layers: dict[str, nn.Module] = {
        "features": features,
        "avgpool": AdaptivePool(6),
        "flatten": nn.Flatten(),
        "classifier": classifier(256 * 6 * 6, num_classes),
    }
    return nn.Sequential(OrderedDict(layers))


def classifier(inputs: int, num_classes: int) -> nn.Sequential:
    """AlexNet's layers after the convolutions."""
    return nn.Sequential(
        nn.Dropout(0.5),
        nn.Linear(inputs, 4096),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(4096, 4096),
        nn.ReLU(),
        nn.Linear(4096, num_classes),
    )
