"""RandAugment (Cubuk et al., NeurIPS 2020, arXiv:1909.13719): operations drawn from fourteen.

All operations are applied to all images, and each image keeps the result of the one it has drawn:
clients train side by side, so only values may depend on the draws, not the sequence of operations.
Strengths are torchvision's; images are interpolated bilinearly.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from fedlens.core import keys
from fedlens.data.augment.changes import (
    Affine,
    as_floats,
    as_they_were,
    blend,
    gray,
    mean_gray,
    warp,
)

LARGEST = 30  # magnitude
OPERATIONS = (
    *("identity", "shear x", "shear y", "translate x", "translate y", "rotate"),
    *("brightness", "color", "contrast", "sharpness"),
    *("posterize", "solarize", "autocontrast", "equalize"),
)


def rand_augment(images: Tensor, row_key: Tensor, count: int, magnitude: float) -> Tensor:
    """`images` of bytes after `count` random operations each, of the same magnitude."""
    x = as_floats(images)
    for number in range(count):
        key = keys.fold(row_key, number)
        drawn = keys.below(keys.fold(key, 0), len(OPERATIONS))
        sign = 2.0 * keys.below(keys.fold(key, 1), 2) - 1
        x = apply(x, drawn, sign, magnitude / LARGEST).round()
    return as_they_were(x, images)


def apply(x: Tensor, drawn: Tensor, sign: Tensor, strength: float) -> Tensor:
    """Apply to each image, floats in 0..255, its drawn operation; `drawn` and `sign` are [C, B].

    `strength` is a share of the maximum. Operations with two directions use the sign.
    """
    chosen = {name: drawn == number for number, name in enumerate(OPERATIONS)}
    factor = 1 + 0.9 * strength * sign
    lost = 2.0 ** round(4 * strength)  # a byte keeps 8 bits, down to 4
    made = {
        "brightness": blend(torch.zeros_like(x), x, factor, is_bytes=True),
        "color": blend(gray(x), x, factor, is_bytes=True),
        "contrast": blend(mean_gray(x), x, factor, is_bytes=True),
        "sharpness": blend(_smooth(x), x, factor, is_bytes=True),
        "posterize": (x / lost).floor() * lost,
        "solarize": torch.where(x >= 255 * (1 - strength), 255 - x, x),
        "autocontrast": _autocontrast(x),
        "equalize": _equalize(x),
    }
    out = warp(x, _movement(chosen, sign * strength, *x.shape[-2:]))
    out = torch.where(_per_image(chosen["identity"]), x, out)
    for name, result in made.items():
        out = torch.where(_per_image(chosen[name]), result, out)
    return out


def _movement(chosen: dict[str, Tensor], strength: Tensor, height: int, width: int) -> Affine:
    """The movement of images that have drawn a geometric operation; others do not move."""

    def of(name: str, most: float) -> Tensor:
        return torch.where(chosen[name], most * strength, 0.0)

    turned = Affine.rotation(of("rotate", math.radians(30)))
    across, down = of("shear x", 0.3), of("shear y", 0.3)  # relative to the first row and column
    return turned._replace(
        xy=turned.xy + across,
        x0=across * (height - 1) / 2 + of("translate x", 150 / 331 * width),
        yx=turned.yx + down,
        y0=down * (width - 1) / 2 + of("translate y", 150 / 331 * height),
    )


def _smooth(x: Tensor) -> Tensor:
    """Average a pixel with weight 5 and its neighbours with weight 1; the border is unchanged."""
    if min(x.shape[-2:]) < 3:
        return x
    flat = x.flatten(0, 2)
    inner = (9 * F.avg_pool2d(flat, 3, 1) + 4 * flat[..., 1:-1, 1:-1]) / 13
    smooth = flat.clone()
    smooth[..., 1:-1, 1:-1] = inner.round()
    return smooth.view(x.shape)


def _autocontrast(x: Tensor) -> Tensor:
    """Stretch each channel to 0..255; a channel with a single value is unchanged."""
    low, high = x.amin((-2, -1), keepdim=True), x.amax((-2, -1), keepdim=True)
    stretched = (x - low) * (255 / (high - low).clamp(min=1))
    return torch.where(high > low, stretched.floor(), x)


def _equalize(x: Tensor) -> Tensor:
    """Spread the values of each channel evenly over 0..255, as Pillow does."""
    rows = x.flatten(-2).contiguous()  # [C, B, channels, H * W]
    darker = torch.searchsorted(rows.sort(-1).values, rows)  # number of darker pixels
    brightest = (rows == rows.amax(-1, keepdim=True)).sum(-1, keepdim=True)
    step = (rows.shape[-1] - brightest) // 255
    spread = (darker + step // 2) // step.clamp(min=1)
    return torch.where(step > 0, spread.clamp(max=255).to(x), rows).view(x.shape)


def _per_image(chosen: Tensor) -> Tensor:  # [C, B] -> [C, B, 1, 1, 1]
    return chosen[:, :, None, None, None]
