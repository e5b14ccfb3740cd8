"""ResNet-18 (He et al., CVPR 2016, arXiv 1512.03385), as in torchvision.

It has torchvision's names and initialisation. The stem is the layers before the first block:
`imagenet` is a 7x7 convolution of stride 2 and a 3x3 max-pool of stride 2, for 224x224; `cifar` a
3x3 convolution alone, for 32x32; `tiny` a 3x3 convolution and the max-pool, for 64x64. So the
last map is 7x7, 4x4 and 4x4. With three channels and 10 classes: 11,181,642 parameters, with the
smaller stems 11,173,962. `norm = "group"` uses GroupNorm instead of BatchNorm.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from torch import Tensor, nn

from fedlens.network.layers import group_norm


def resnet18(
    shape: tuple[int, int, int],
    num_classes: int,
    *,
    stem: Literal["imagenet", "cifar", "tiny"] = "imagenet",
    norm: Literal["batch", "group"] = "batch",
) -> nn.Module:
    """torchvision's ResNet-18, with stems for smaller images.

    Args:
        stem: `imagenet` for images of 224×224, `tiny` of 64×64, `cifar` of 32×32.
        norm: `group` puts group normalisation in the place of batch normalisation.
    """
    model = ResNet18(shape[0], num_classes, stem)
    return group_norm(model) if norm == "group" else model


class ResNet18(nn.Module):
    def __init__(
        self, channels: int, num_classes: int, stem: Literal["imagenet", "cifar", "tiny"]
    ) -> None:
        super().__init__()
        if stem == "imagenet":
            self.conv1 = nn.Conv2d(channels, 64, 7, stride=2, padding=3, bias=False)
        else:
            self.conv1 = nn.Conv2d(channels, 64, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU()
        self.maxpool = nn.Identity() if stem == "cifar" else nn.MaxPool2d(3, 2, padding=1)
        self.layer1 = nn.Sequential(Block(64, 64, 1), Block(64, 64, 1))
        self.layer2 = nn.Sequential(Block(64, 128, 2), Block(128, 128, 1))
        self.layer3 = nn.Sequential(Block(128, 256, 2), Block(256, 256, 1))
        self.layer4 = nn.Sequential(Block(256, 512, 2), Block(512, 512, 1))
        self.fc = nn.Linear(512, num_classes)
        for part in self.modules():
            if isinstance(part, nn.Conv2d):
                nn.init.kaiming_normal_(part.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        logits: Tensor = self.fc(x.mean((2, 3)))
        return logits


class Block(nn.Module):
    """Two 3x3 convolutions and a skip connection."""

    def __init__(self, channels: int, wider: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, wider, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(wider)
        self.relu = nn.ReLU()
        self.conv2 = nn.Conv2d(wider, wider, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(wider)
        self.downsample: Callable[[Tensor], Tensor] | None = None
        if channels != wider:
            self.downsample = nn.Sequential(
                nn.Conv2d(channels, wider, 1, stride, bias=False), nn.BatchNorm2d(wider)
            )

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        around = x if self.downsample is None else self.downsample(x)
        added: Tensor = self.relu(out + around)
        return added
