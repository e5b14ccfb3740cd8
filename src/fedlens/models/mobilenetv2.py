"""MobileNetV2 (Sandler et al., CVPR 2018, arXiv 1801.04381), as in torchvision.

It has torchvision's names and initialisation. With three channels and 10 classes: 2,236,682
parameters. Hsu, Qi and Brown (2020, arXiv 2003.08082) train it with GroupNorm, `norm = "group"`:
the number of groups is the largest divisor of the channels that is at most 32 and leaves at least
four channels a group, else 1. For Landmarks they put a layer of 64 before the classifier, which
keeps a head of many classes small (`bottleneck = 64`). It is linear here, since the paper names no
activation.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Literal, NamedTuple

from torch import Tensor, nn

from fedlens.network.layers import group_norm


class Stage(NamedTuple):
    expansion: int
    channels: int
    blocks: int
    stride: int  # of the first block
    kernel: int = 3


STAGES = (
    Stage(1, 16, 1, 1),
    Stage(6, 24, 2, 2),
    Stage(6, 32, 3, 2),
    Stage(6, 64, 4, 2),
    Stage(6, 96, 3, 1),
    Stage(6, 160, 3, 2),
    Stage(6, 320, 1, 1),
)
WIDTH = 1280  # features that the classifier gets


def mobilenetv2(
    shape: tuple[int, int, int],
    num_classes: int,
    *,
    norm: Literal["batch", "group"] = "batch",
    bottleneck: int = 0,
) -> nn.Module:
    """torchvision's MobileNetV2.

    Args:
        norm: `group` puts group normalisation in the place of batch normalisation.
        bottleneck: the width of a linear layer before the classifier; 0: there is none.
    """
    if bottleneck < 0:
        raise ValueError(f"bottleneck is {bottleneck}: choose a width, or 0 for none")
    model = MobileNetV2(shape[0], num_classes, bottleneck)
    return group_norm(model) if norm == "group" else model


class MobileNetV2(nn.Module):
    def __init__(
        self,
        channels: int,
        num_classes: int,
        bottleneck: int,
        stages: Iterable[Stage] = STAGES,
    ) -> None:
        super().__init__()
        features: list[nn.Module] = [_convolution(channels, 32, 3, stride=2)]
        channels = 32
        for expansion, wider, blocks, stride, kernel in stages:
            for block in range(blocks):
                step = stride if block == 0 else 1
                features.append(Inverted(channels, wider, step, expansion, kernel))
                channels = wider
        features.append(_convolution(channels, WIDTH, 1))
        self.features = nn.Sequential(*features)
        widths = [WIDTH, bottleneck, num_classes] if bottleneck else [WIDTH, num_classes]
        linear = [nn.Linear(*pair) for pair in pairwise(widths)]
        self.classifier = nn.Sequential(nn.Dropout(0.2), *linear)
        for part in self.modules():
            if isinstance(part, nn.Conv2d):
                nn.init.kaiming_normal_(part.weight, mode="fan_out")
            elif isinstance(part, nn.Linear):
                nn.init.normal_(part.weight, 0, 0.01)
                nn.init.zeros_(part.bias)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.features(x).mean((2, 3)))
        return logits


class Inverted(nn.Module):
    """Widen by 1x1, filter each channel, narrow by 1x1; a skip connection if it fits."""

    def __init__(self, channels: int, wider: int, stride: int, expansion: int, kernel: int) -> None:
        super().__init__()
        hidden = channels * expansion
        widen = [_convolution(channels, hidden, 1)] if expansion > 1 else []
        self.conv = nn.Sequential(
            *widen,
            _convolution(hidden, hidden, kernel, stride, groups=hidden),
            nn.Conv2d(hidden, wider, 1, bias=False),
            nn.BatchNorm2d(wider),
        )
        self.around = stride == 1 and channels == wider

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.conv(x)
        return x + out if self.around else out


def _convolution(
    channels: int, wider: int, kernel: int, stride: int = 1, groups: int = 1
) -> nn.Sequential:
    pad = kernel // 2
    return nn.Sequential(
        nn.Conv2d(channels, wider, kernel, stride, pad, groups=groups, bias=False),
        nn.BatchNorm2d(wider),
        nn.ReLU6(),
    )
