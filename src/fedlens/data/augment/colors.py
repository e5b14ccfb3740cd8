"""Brightness, contrast and saturation.

Images are [C, B, channels, H, W], with a key for each of them [C, B].
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fedlens.core import keys

RED, GREEN, BLUE = 0.299, 0.587, 0.114  # luma coefficients of ITU-R BT.601


def jitter(
    images: Tensor, row_key: Tensor, brightness: float, contrast: float, saturation: float
) -> Tensor:
    """Scale each by a random factor between 1 - x and 1 + x, as torchvision's ColorJitter does.

    The order is fixed as above, and there is no change of hue.
    """
    x, is_bytes = as_floats(images), not images.is_floating_point()
    changes: list[tuple[float, Callable[[Tensor], Tensor]]] = [
        (brightness, torch.zeros_like),
        (contrast, mean_gray),
        (saturation, gray),
    ]
    for number, (most, faded) in enumerate(changes):
        if most:
            low = max(1 - most, 0.0)
            factor = low + (1 + most - low) * keys.uniform(keys.fold(row_key, number))
            x = blend(faded(x), x, factor, is_bytes)
    return as_they_were(x, images)


def blend(one: Tensor, other: Tensor, share: Tensor, is_bytes: bool) -> Tensor:
    """one + share (other - one), with a share [C, B] for each image; bytes stay in 0..255."""
    mixed = one + share.to(other)[:, :, None, None, None] * (other - one)
    return mixed.clamp(0, 255) if is_bytes else mixed


def gray(x: Tensor) -> Tensor:  # [C, B, 1, H, W]
    """The brightness of each pixel."""
    if x.shape[2] != 3:
        return x.mean(2, keepdim=True)
    red, green, blue = x.unbind(2)
    return (RED * red + GREEN * green + BLUE * blue)[:, :, None]


def mean_gray(x: Tensor) -> Tensor:  # [C, B, 1, 1, 1]
    return gray(x).mean((-2, -1), keepdim=True)


def as_floats(images: Tensor) -> Tensor:
    return images.to(torch.promote_types(images.dtype, torch.float32))


def as_they_were(x: Tensor, images: Tensor) -> Tensor:
    """`x` in the dtype of `images`, rounded for bytes."""
    return (x if images.is_floating_point() else x.round()).to(images.dtype)
