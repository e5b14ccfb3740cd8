"""Changes of batches of images: crops, mirror images, rotations, colours, RandAugment, mixup.

Images are [C, B, channels, H, W], with a key for each of them [C, B].
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fedlens.core import Batch, keys

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


LARGEST = 30  # magnitude
OPERATIONS = (
    *("identity", "shear x", "shear y", "translate x", "translate y", "rotate"),
    *("brightness", "color", "contrast", "sharpness"),
    *("posterize", "solarize", "autocontrast", "equalize"),
)


def rand_augment(images: Tensor, row_key: Tensor, count: int, magnitude: float) -> Tensor:
    """`images` of bytes after `count` random operations each, of the same magnitude.

    RandAugment (Cubuk et al., NeurIPS 2020, arXiv:1909.13719). All operations are applied to all
    images, and each image keeps the result of the one it has drawn: clients train side by side, so
    only values may depend on the draws, not the sequence of operations. Strengths are
    torchvision's; images are interpolated bilinearly.
    """
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


class Mixture(NamedTuple):
    """Which image of its batch each image is mixed with, and the share of the image itself.

    Mixup (Zhang et al., ICLR 2018, arXiv:1710.09412): an image becomes share x_i + (1 - share) x_j,
    and its loss share l(y_i) + (1 - share) l(y_j), where share is from Beta(alpha, alpha). Every
    example has a share and a partner of its own, drawn from the batch of its client; the original
    has one share for a whole batch.
    """

    partner: Tensor  # [C, B] rows of the batch
    share: Tensor  # [C, B] float64

    def of_images(self, images: Tensor) -> Tensor:  # [C, B, channels, H, W]
        x = as_floats(images)
        share = self.share.to(x)[:, :, None, None, None]
        return as_they_were(share * x + (1 - share) * self._partners(x), images)

    def two_labels(self, logits: Tensor, batch: Batch) -> tuple[Tensor, Batch]:
        """Each mixed image as two examples with weights `share` and 1 - `share`: [C, 2 B].

        So a weighting of examples by their labels applies to both labels.
        """
        share = self.share.to(batch.mask)
        return torch.cat([logits, logits], 1), Batch(
            images=torch.cat([batch.images, batch.images], 1),
            labels=torch.cat([batch.labels, self._partners(batch.labels)], 1),
            mask=torch.cat([batch.mask * share, batch.mask * (1 - share)], 1),
        )

    def _partners(self, rows: Tensor) -> Tensor:  # [C, B, ...]
        client = torch.arange(len(rows), device=rows.device)[:, None]
        return rows[client, self.partner]


def mixture(row_key: Tensor, counts: Tensor, alpha: float) -> Mixture:
    """Draw it by a key for each image [C, B]; the first `counts` [C] of a batch are examples."""
    drawn = keys.uniform(keys.fold(row_key, 0)) * counts[:, None]
    # Beta(a, a) in closed form, from Student's t (Bailey, 1994; Devroye, 1996). 1 - u is above 0.
    root = (1 - keys.uniform(keys.fold(row_key, 1))) ** (-1 / alpha) - 1
    cos = (2 * math.pi * keys.uniform(keys.fold(row_key, 2))).cos()
    squared = root * cos.square()  # it may be infinite if alpha is small
    return Mixture(drawn.long(), (1 + cos.sign() / (1 + 1 / squared).sqrt()) / 2)
