"""AlexNet (Krizhevsky, "One weird trick", 2014, arXiv 1404.5997), for large and small images."""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

from fedlens.models.geometry import num_features
from fedlens.network.pool import AdaptivePool


def alexnet(shape: tuple[int, int, int], num_classes: int) -> nn.Module:
    """torchvision's AlexNet.

    Five convolutions and layers of 4096 and 4096, for 224x224; with torchvision's names, so that
    its published files load. It needs 63x63 at least: `alexnet-32` is made for smaller images. At
    10 classes: 57,044,810 parameters for three channels, whatever the size.
    """
    features = _features(
        nn.Conv2d(shape[0], 64, 11, stride=4, padding=2), nn.Conv2d(64, 192, 5, padding=2), pool=3
    )
    num_features("alexnet", features, shape)  # raises an error if images are too small
    return _net(features, num_classes, 256 * 6 * 6, {"avgpool": AdaptivePool(6)})


def alexnet_32(shape: tuple[int, int, int], num_classes: int) -> nn.Module:
    """AlexNet for images of 32x32.

    FedNS (Zhuo and Li, 2021, arXiv 2101.07995) trains AlexNet on CIFAR-10 and does not say which;
    torchvision's cannot take 32x32. This is the usual variant: 3x3 convolutions of 64 (stride 2),
    192, 384, 256 and 256 channels, 2x2 max-pools, layers of 4096 and 4096 with dropout. On 3x32x32
    with 10 classes: 23,272,266 parameters.
    """
    features = _features(
        nn.Conv2d(shape[0], 64, 3, stride=2, padding=1), nn.Conv2d(64, 192, 3, padding=1), pool=2
    )
    return _net(features, num_classes, num_features("alexnet-32", features, shape), {})


def _features(first: nn.Conv2d, second: nn.Conv2d, pool: int) -> nn.Sequential:
    return nn.Sequential(
        first,
        nn.ReLU(),
        nn.MaxPool2d(pool, 2),
        second,
        nn.ReLU(),
        nn.MaxPool2d(pool, 2),
        nn.Conv2d(192, 384, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(384, 256, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(256, 256, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(pool, 2),
    )


def _net(
    features: nn.Sequential, num_classes: int, inputs: int, between: dict[str, nn.Module]
) -> nn.Module:
    classifier = nn.Sequential(
        nn.Dropout(0.5),
        nn.Linear(inputs, 4096),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(4096, 4096),
        nn.ReLU(),
        nn.Linear(4096, num_classes),
    )
    tail = {"flatten": nn.Flatten(), "classifier": classifier}
    return nn.Sequential(OrderedDict({"features": features, **between, **tail}))
