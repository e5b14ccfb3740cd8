"""EfficientNet-Lite0 (Google, 2020): EfficientNet-B0 (Tan and Le, ICML 2019) for small devices.

It is MobileNetV2 with other stages, without squeeze-and-excitation. With three channels and 1,000
classes: 4,652,008 parameters. Its tensors have the names of MobileNetV2. It pads as TensorFlow
does: before a stride of 2 one pixel less on the left of an even width and at the top of an even
height, so that weights that were trained there see the same pixels. BatchNorm has eps 0.001 and
momentum 0.01.

`weights = "imagenet"` are in the package of the extra `pretrained`; they take images from -1 to 1,
as `normalise = "imagenet"` makes them for this model.
"""

from __future__ import annotations

from typing import Literal

from torch import nn

from fedlens.models.mobilenetv2 import MobileNetV2, Stage
from fedlens.network.layers import group_norm

STAGES = (
    Stage(1, 16, 1, 1),
    Stage(6, 24, 2, 2),
    Stage(6, 40, 2, 2, kernel=5),
    Stage(6, 80, 3, 2),
    Stage(6, 112, 3, 1, kernel=5),
    Stage(6, 192, 4, 2, kernel=5),
    Stage(6, 320, 1, 1),
)


def efficientnet_lite0(
    shape: tuple[int, int, int],
    num_classes: int,
    *,
    norm: Literal["batch", "group"] = "batch",
) -> nn.Module:
    """EfficientNet-Lite0, for which there are weights trained on ImageNet.

    Args:
        norm: `group` puts group normalisation in the place of batch normalisation.
    """
    channels, height, width = shape
    model = MobileNetV2(channels, num_classes, bottleneck=0, stages=STAGES)
    for part in [*model.modules()]:
        if isinstance(part, nn.BatchNorm2d):
            part.eps, part.momentum = 1e-3, 0.01
        elif isinstance(part, nn.Sequential) and isinstance(first := part[0], nn.Conv2d):
            if first.stride != (2, 2):
                continue
            _pad_as_tensorflow(part, first, height, width)
            height, width = -(-height // 2), -(-width // 2)
    return group_norm(model) if norm == "group" else model


def _pad_as_tensorflow(
    part: nn.Sequential, convolution: nn.Conv2d, height: int, width: int
) -> None:
    """Put padding for images of this size before a convolution of stride 2; names stay."""
    most = convolution.kernel_size[0] // 2
    convolution.padding = (0, 0)
    left, top = most - (1 - width % 2), most - (1 - height % 2)
    children = dict(part.named_children())
    for name in children:
        delattr(part, name)
    part.add_module("pad", nn.ZeroPad2d((left, most, top, most)))
    for name, child in children.items():
        part.add_module(name, child)
