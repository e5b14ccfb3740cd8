"""VGG-11 (Simonyan and Zisserman, ICLR 2015, arXiv 1409.1556), as in torchvision.

Eight 3x3 convolutions without batch normalisation and layers of 4096 and 4096, for 224x224; with
torchvision's names and initialisation. It needs 32x32 at least. At 10 classes, three channels:
128,807,306 parameters. `pool` is the side of the map that the first linear layer sees. On 32x32
the convolutions leave one pixel, which `pool = 7` repeats 49 times, as torchvision does, so that
published files load; `pool = 1` takes it once: 28,144,010 parameters.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Literal

from torch import nn

from fedlens.models.geometry import num_features
from fedlens.network.pool import AdaptivePool

CHANNELS = ((64,), (128,), (256, 256), (512, 512), (512, 512))  # a max-pool after each group


def vgg11(shape: tuple[int, int, int], num_classes: int, *, pool: Literal[7, 1] = 7) -> nn.Module:
    """torchvision's VGG-11.

    Args:
        pool: how many pixels wide the last map is made; on 32×32 it is one, which 7 repeats.
    """
    features: list[nn.Module] = []
    channels = shape[0]
    for group in CHANNELS:
        for wider in group:
            features += [nn.Conv2d(channels, wider, 3, padding=1), nn.ReLU()]
            channels = wider
        features.append(nn.MaxPool2d(2))
    num_features("vgg11", features, shape)  # raises an error if images are too small
    classifier = nn.Sequential(
        nn.Linear(channels * pool * pool, 4096),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(4096, 4096),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(4096, num_classes),
    )
    layers: dict[str, nn.Module] = {
        "features": nn.Sequential(*features),
        "avgpool": AdaptivePool(pool),
        "flatten": nn.Flatten(),
        "classifier": classifier,
    }
    model = nn.Sequential(OrderedDict(layers))
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight, 0, 0.01)
        if isinstance(layer, (nn.Conv2d, nn.Linear)):
            assert layer.bias is not None
            nn.init.zeros_(layer.bias)
    return model
