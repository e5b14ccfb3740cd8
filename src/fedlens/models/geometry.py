"""The size of an image after convolutions and pools."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count

from torch import nn


def num_features(model: str, layers: Iterable[nn.Module], shape: tuple[int, int, int]) -> int:
    """The number of outputs of these layers for an image of [channels, height, width]."""
    layers = list(layers)
    channels, height, width = shape
    if min(_after(layers, height), _after(layers, width)) < 1:
        least = next(side for side in count(1) if _after(layers, side) >= 1)
        raise ValueError(
            f"{model} cannot take images of {height} x {width}: "
            f"resize them to at least {least} x {least}, or choose another model"
        )
    for layer in layers:
        if isinstance(layer, nn.Conv2d):
            channels = layer.out_channels
    return channels * _after(layers, height) * _after(layers, width)


def _after(layers: list[nn.Module], side: int) -> int:
    """The side of a square image after these layers; less than 1 if it is too small for them."""
    for layer in layers:
        if isinstance(layer, nn.Conv2d):
            assert not isinstance(layer.padding, str)
            side += 2 * layer.padding[0] - layer.kernel_size[0]
            side = side // layer.stride[0] + 1
        elif isinstance(layer, nn.MaxPool2d):
            assert isinstance(layer.kernel_size, int) and isinstance(layer.padding, int)
            assert isinstance(layer.stride, int)
            side = (side + 2 * layer.padding - layer.kernel_size) // layer.stride + 1
        if side < 1:
            return 0
    return side
