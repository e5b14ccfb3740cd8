"""The net of PyTorch's CIFAR-10 tutorial, which NIID-Bench and others call simple-cnn.

5x5 convolutions of 6 and 16 channels without padding, each with a 2x2 max-pool, and layers of 120
and 84. With 10 classes: 62,006 parameters on 3x32x32, 44,426 on 1x28x28.
"""

from __future__ import annotations

from torch import nn

from fedlens.models.two_convolutions import two_convolutions


def simple_cnn(shape: tuple[int, int, int], num_classes: int) -> nn.Module:
    """The net of PyTorch's CIFAR-10 tutorial."""
    return two_convolutions("simple-cnn", shape, num_classes, channels=(6, 16), hidden=(120, 84))
