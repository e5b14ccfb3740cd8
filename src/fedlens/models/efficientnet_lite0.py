"""EfficientNet-Lite0 (Google, 2020): EfficientNet-B0 (Tan and Le, ICML 2019) for small devices.

It is MobileNetV2 with other stages, without squeeze-and-excitation. With three channels and 1,000
classes: 4,652,008 parameters. Its tensors have the names of MobileNetV2. It pads as TensorFlow
does: before a stride of 2 one pixel less on the left and at the top, so that weights that were
trained there see the same pixels. BatchNorm has eps 0.001 and momentum 0.01.

`weights = "imagenet"` are in the package of the extra `pretrained`; they take images from -1 to 1,
as `normalise = "imagenet"` makes them for this model.
"""

from __future__ import annotations

from torch import nn

from fedlens.models.mobilenetv2 import MobileNetV2, Stage

STAGES = (
    Stage(1, 16, 1, 1),
    Stage(6, 24, 2, 2),
    Stage(6, 40, 2, 2, kernel=5),
    Stage(6, 80, 3, 2),
    Stage(6, 112, 3, 1, kernel=5),
    Stage(6, 192, 4, 2, kernel=5),
    Stage(6, 320, 1, 1),
)


def efficientnet_lite0(shape: tuple[int, int, int], num_classes: int) -> nn.Module:
    """EfficientNet-Lite0, for which there are weights trained on ImageNet."""
    model = MobileNetV2(shape[0], num_classes, bottleneck=0, stages=STAGES)
    for part in [*model.modules()]:
        if isinstance(part, nn.BatchNorm2d):
            part.eps, part.momentum = 1e-3, 0.01
        elif isinstance(part, nn.Sequential) and isinstance(part[0], nn.Conv2d):
            _pad_as_tensorflow(part)
    return model


def _pad_as_tensorflow(part: nn.Sequential) -> None:
    """Put the padding of even sizes before a convolution of stride 2; names stay."""
    convolution = part[0]
    assert isinstance(convolution, nn.Conv2d)
    if convolution.stride == (2, 2):
        more = convolution.kernel_size[0] // 2
        convolution.padding = (0, 0)
        children = dict(part.named_children())
        for name in children:
            delattr(part, name)
        part.add_module("pad", nn.ZeroPad2d((more - 1, more, more - 1, more)))
        for name, child in children.items():
            part.add_module(name, child)
