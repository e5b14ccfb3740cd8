"""What `Augment` does to a batch, change after change."""

from __future__ import annotations

import torch
from torch import Tensor

from fedlens import keys
from fedlens.augment.augment import Augment
from fedlens.augment.colors import jitter
from fedlens.augment.crops import crop_and_flip, cut_out, resize_parts
from fedlens.augment.mixup import Mixture, mixture
from fedlens.augment.rand_augment import rand_augment
from fedlens.augment.warp import rotate


def changed(augment: Augment, images: Tensor, key: Tensor) -> Tensor:
    """`images` [C, B, channels, H, W] augmented, by one key [C] for each client and step."""

    def rows(word: str) -> Tensor:  # [C, B]
        """A key for each image, for the change called `word`."""
        row = torch.arange(images.shape[1], device=images.device)
        return keys.fold(key[:, None], keys.purpose(word), row)

    if augment.resized:
        images = resize_parts(images, rows("resize"), augment.resized, augment.aspect)
    if augment.crop or augment.flip:
        images = crop_and_flip(images, rows("augment"), augment.crop, augment.flip)
    if augment.rotate:
        images = rotate(images, rows("rotate"), augment.rotate)
    if augment.brightness or augment.contrast or augment.saturation:
        most = augment.brightness, augment.contrast, augment.saturation
        images = jitter(images, rows("color"), *most)
    if augment.rand_augment:
        images = rand_augment(images, rows("rand_augment"), augment.rand_augment, augment.magnitude)
    if augment.cutout:
        images = cut_out(images, rows("cutout"), augment.cutout)
    return images


def mixture_of(augment: Augment, key: Tensor, counts: Tensor, size: int) -> Mixture | None:
    """How batches of `size` are mixed, or None; `counts` [C] of each batch are examples."""
    if not augment.mixup:
        return None
    row = torch.arange(size, device=key.device)
    row_keys = keys.fold(key[:, None], keys.purpose("mixup"), row)
    return mixture(row_keys, counts, augment.mixup)
