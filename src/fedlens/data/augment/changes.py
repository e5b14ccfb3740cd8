"""Changes of batches of images: crops, mirror images, rotations, brightness and colours.

Images are [C, B, channels, H, W], with a key for each of them [C, B].
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fedlens.core import keys

RED, GREEN, BLUE = 0.299, 0.587, 0.114  # luma coefficients of ITU-R BT.601


def crop_and_flip(images: Tensor, row_key: Tensor, crop: int, flip: bool) -> Tensor:
    """Random crops of images padded by `crop` zeros on each side, and random mirror images."""
    height, width = images.shape[-2:]
    x = torch.arange(width, device=images.device).expand(*row_key.shape, width)
    y = torch.arange(height, device=images.device).expand(*row_key.shape, height)
    if flip:
        mirrored = keys.below(keys.fold(row_key, 0), 2) == 1
        x = torch.where(mirrored[..., None], width - 1 - x, x)
    if crop:
        x = x + keys.below(keys.fold(row_key, 1), 2 * crop + 1)[..., None]
        y = y + keys.below(keys.fold(row_key, 2), 2 * crop + 1)[..., None]
    pixel = y[..., :, None] * (width + 2 * crop) + x[..., None, :]
    return _gather(images, crop, pixel)


def resize_parts(images: Tensor, row_key: Tensor, least: float, aspect: float) -> Tensor:
    """A random part of each image, stretched to the whole by bilinear interpolation.

    The part has a uniformly random share of the area, from `least` to 1, and an aspect ratio
    between `aspect` and 1 / `aspect`, as far as that fits.
    """
    height, width = images.shape[-2:]
    # In float64: how roots and powers are rounded depends on the number of images side by side.
    area, shape, x, y = (keys.uniform(keys.fold(row_key, i)).flatten() for i in range(4))
    side = (least + (1 - least) * area).sqrt()
    # A part that is longer than the image would be cut off, and be smaller than drawn.
    longest = (1 / side).clamp(max=aspect**0.5)
    stretch = longest ** (2 * shape - 1)  # the root of the ratio of the sides
    wide, tall = ((side * s).clamp(max=1) for s in (stretch, 1 / stretch))  # against rounding
    left, top = x * (1 - wide), y * (1 - tall)  # as shares of the sides, like `wide` and `tall`
    across = (torch.arange(width, device=images.device) + 0.5) / width
    down = (torch.arange(height, device=images.device) + 0.5) / height
    at_x = (left[:, None] + wide[:, None] * across)[:, None, :].expand(-1, height, -1)
    at_y = (top[:, None] + tall[:, None] * down)[:, :, None].expand(-1, -1, width)
    places = 2 * torch.stack([at_x, at_y], -1) - 1
    flat = as_floats(images).flatten(0, 1)
    sampled = F.grid_sample(flat, places.to(flat), padding_mode="border", align_corners=False)
    return as_they_were(sampled, images).view(images.shape)


def cut_out(images: Tensor, row_key: Tensor, side: int) -> Tensor:
    """Set a square of this side around a random pixel to zero (DeVries and Taylor, 2017,
    arXiv:1708.04552); its part beyond the border is cut off."""
    inside = []
    for axis, size in enumerate(images.shape[-2:]):
        first = keys.below(keys.fold(row_key, axis), size) - side // 2  # [C, B]
        place = torch.arange(size, device=images.device) - first[..., None]
        inside.append((place >= 0) & (place < side))
    square = inside[0][..., :, None] & inside[1][..., None, :]  # [C, B, H, W]
    return images.masked_fill(square[:, :, None], 0)


def _gather(images: Tensor, pad: int, pixel: Tensor) -> Tensor:
    """The pixels of padded images at `pixel` [C, B, H, W], positions in the padded image."""
    num_clients, size, channels, height, width = images.shape
    flat = images.flatten(0, 1)  # [N, channels, H, W]
    index = pixel.view(len(flat), -1)  # [N, H * W]
    if flat.stride(1) == 1:  # keep channels last
        padded = F.pad(flat.movedim(1, -1), (0, 0, pad, pad, pad, pad)).flatten(1, 2)
        out = padded.gather(1, index[:, :, None].expand(-1, -1, channels))
        return out.view(num_clients, size, height, width, channels).movedim(-1, 2)
    padded = F.pad(flat, (pad, pad, pad, pad)).flatten(2)
    return padded.gather(2, index[:, None, :].expand(-1, channels, -1)).view(images.shape)


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
