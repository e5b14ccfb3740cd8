"""AlexNet for CIFAR's 32x32, which torchvision's cannot take.

FedNS (Zhuo and Li, 2021, arXiv 2101.07995) trains AlexNet on CIFAR-10 and does not say which.
This is the usual variant: 3x3 convolutions of 64 (stride 2), 192, 384, 256 and 256 channels,
2x2 max-pools, layers of 4096 and 4096 with dropout. On 3x32x32 with 10 classes: 23,272,266
parameters.
"""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

from fedlens.models.alexnet import classifier
from fedlens.models.geometry import num_features


def alexnet_32(shape: tuple[int, int, int], num_classes: int) -> nn.Module:
    """AlexNet for images of 32x32."""
    features = nn.Sequential(
        nn.Conv2d(shape[0], 64, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(64, 192, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(192, 384, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(384, 256, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(256, 256, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
    )
    layers: dict[str, nn.Module] = {
        "features": features,
        "flatten": nn.Flatten(),
        "classifier": classifier(num_features("alexnet-32", features, shape), num_classes),
    }
    return nn.Sequential(OrderedDict(layers))
