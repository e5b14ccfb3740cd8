"""What happens to a whole batch of images between the data set and the model."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fedlens import keys


@dataclass(frozen=True)
class Augment:
    """Random crops of images padded by `crop` zeros on each side, and random mirror images.

    With `resized` above 0, first a random part of each image, between that share of its area and
    all of it and between `aspect` and 1 / `aspect` in shape, is stretched to the whole (for
    images of 224 px and the like; 0.08 and 4 / 3 are customary).

    What happens to an image depends on its client's key and on its row in the batch, never on
    which other clients are beside it.
    """

    crop: int = 0
    flip: bool = False
    resized: float = 0.0
    aspect: float = 4 / 3

    def __post_init__(self) -> None:
        if self.crop < 0:
            raise ValueError(
                f"augment.crop is {self.crop}: choose how many pixels to pad, 0 for none"
            )
        if not 0 <= self.resized <= 1:
            raise ValueError(
                f"augment.resized is {self.resized}: choose a share of the area, 0 for none"
            )
        if not 1 <= self.aspect < float("inf"):
            raise ValueError(f"augment.aspect is {self.aspect}: choose 1 or more")

    def __call__(self, images: Tensor, key: Tensor) -> Tensor:
        """`images` [C, B, channels, H, W] augmented, by one key [C] for each client and step."""
        if self.resized:
            images = self._resize(images, key)
        if not (self.crop or self.flip):
            return images
        height, width = images.shape[-2:]
        row = torch.arange(images.shape[1], device=images.device)
        row_key = keys.fold(key[:, None], keys.purpose("augment"), row)  # [C, B]
        x = torch.arange(width, device=images.device).expand(*row_key.shape, width)
        y = torch.arange(height, device=images.device).expand(*row_key.shape, height)
        if self.flip:
            mirrored = keys.below(keys.fold(row_key, 0), 2) == 1
            x = torch.where(mirrored[..., None], width - 1 - x, x)
        if self.crop:
            x = x + keys.below(keys.fold(row_key, 1), 2 * self.crop + 1)[..., None]
            y = y + keys.below(keys.fold(row_key, 2), 2 * self.crop + 1)[..., None]
        pixel = y[..., :, None] * (width + 2 * self.crop) + x[..., None, :]
        return _gather(images, self.crop, pixel)

    def _resize(self, images: Tensor, key: Tensor) -> Tensor:
        """A random part of each image, stretched to the whole by bilinear interpolation."""
        height, width = images.shape[-2:]
        row = torch.arange(images.shape[1], device=images.device)
        row_key = keys.fold(key[:, None], keys.purpose("resize"), row)  # [C, B]
        area, shape, x, y = (
            keys.uniform(keys.fold(row_key, i)).flatten().float() for i in range(4)
        )
        area = self.resized + (1 - self.resized) * area
        stretch = self.aspect ** (shape - 0.5)  # the root of the ratio of the sides
        wide, tall = ((area.sqrt() * s).clamp(max=1) for s in (stretch, 1 / stretch))
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


def _gather(images: Tensor, pad: int, pixel: Tensor) -> Tensor:
    """The pixels [C, B, H, W] of padded images, given by their place in the padded image."""
    num_clients, size, channels, height, width = images.shape
    flat = images.flatten(0, 1)  # [N, channels, H, W]
    index = pixel.view(len(flat), -1)  # [N, H * W]
    if flat.stride(1) == 1:  # channels last: stay so
        padded = F.pad(flat.movedim(1, -1), (0, 0, pad, pad, pad, pad)).flatten(1, 2)
        out = padded.gather(1, index[:, :, None].expand(-1, -1, channels))
        return out.view(num_clients, size, height, width, channels).movedim(-1, 2)
    padded = F.pad(flat, (pad, pad, pad, pad)).flatten(2)
    return padded.gather(2, index[:, None, :].expand(-1, channels, -1)).view(images.shape)
