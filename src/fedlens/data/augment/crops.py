"""Parts of images: crops, mirror images, parts stretched to the whole, squares cut out.

Images are [C, B, channels, H, W], with a key for each of them [C, B].
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fedlens.core import keys


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
    flat = images.flatten(0, 1)
    wide_type = torch.promote_types(images.dtype, torch.float32)
    sampled = F.grid_sample(
        flat.to(wide_type), places.to(wide_type), padding_mode="border", align_corners=False
    )
    if not images.is_floating_point():
        sampled = sampled.round()
    return sampled.to(images.dtype).view(images.shape)


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
