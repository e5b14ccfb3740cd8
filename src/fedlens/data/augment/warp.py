"""Rotates, shears and shifts images.

Images are [C, B, channels, H, W], with a key for each of them [C, B].
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fedlens.core import keys
from fedlens.data.augment.colors import as_floats, as_they_were


class Affine(NamedTuple):
    """Maps a pixel to its source; both positions are in pixels from the centre: [C, B] each.

    x_from = xx x + xy y + x0, and y_from = yx x + yy y + y0.
    """

    xx: Tensor
    xy: Tensor
    x0: Tensor
    yx: Tensor
    yy: Tensor
    y0: Tensor

    @classmethod
    def rotation(cls, angle: Tensor) -> Affine:
        """A counterclockwise rotation by an angle in radians."""
        cos, sin = angle.cos(), angle.sin()
        zero = torch.zeros_like(angle)
        return cls(cos, -sin, zero, sin, cos, zero)


def rotate(images: Tensor, row_key: Tensor, degrees: float) -> Tensor:
    """Rotate each image about its centre by a random angle of up to `degrees` either way."""
    angle = (2 * keys.uniform(row_key) - 1) * math.radians(degrees)
    return as_they_were(warp(as_floats(images), Affine.rotation(angle)), images)


def warp(images: Tensor, how: Affine) -> Tensor:
    """Transform float images with bilinear interpolation; zeros outside of an image."""
    height, width = images.shape[-2:]
    x = torch.arange(width, device=images.device) - (width - 1) / 2
    y = torch.arange(height, device=images.device)[:, None] - (height - 1) / 2
    xx, xy, x0, yx, yy, y0 = (number.flatten()[:, None, None] for number in how)
    places = torch.stack(
        [(xx * x + xy * y + x0) * 2 / width, (yx * x + yy * y + y0) * 2 / height], -1
    )
    flat = images.flatten(0, 1)
    sampled = F.grid_sample(flat, places.to(flat), align_corners=False)
    return sampled.view(images.shape)
