"""Augmentation of whole batches of images, between the data set and the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from fedlens.config.options import Bounds
from fedlens.config.sections import Chance, Factor, WholeNumber, check_fields

if TYPE_CHECKING:
    from torch import Tensor

    from fedlens.data.augment.changes import Mixture


@dataclass(frozen=True)
class Augment:
    """Random changes of training images, of which several are made in this order: `resized`, `crop`
    and `flip`, `rotate`, `brightness` to `saturation`, `rand_augment`, `cutout`, `mixup`.

    What happens to an image depends on its client's key and on its row in the batch, never on
    which other clients are beside it.
    """

    crop: WholeNumber = 0
    """pad training images by this many pixels on each side, and crop at random: see
    [Augmentation](training.md#augmentation)"""
    flip: bool = False
    """mirror training images at random"""
    resized: Chance = 0.0
    """stretch a random part of each training image to the whole: the least share of its area; 0 for
    none"""
    aspect: Annotated[float, Bounds(least=1)] = 4 / 3
    """how far from square such a part may be"""
    rotate: Annotated[float, Bounds(least=0, most=180)] = 0.0
    """rotate training images by up to this many degrees either way"""
    brightness: Factor = 0.0
    """multiply brightness by a factor between 1 − this and 1 + this"""
    contrast: Factor = 0.0
    """the same for contrast"""
    saturation: Factor = 0.0
    """the same for saturation"""
    rand_augment: Annotated[int, Bounds(least=0, most=20)] = 0
    """this many random operations of RandAugment (Cubuk et al., NeurIPS 2020) on each training
    image; 2 is customary"""
    magnitude: Annotated[float, Bounds(least=0, most=30)] = 9.0
    """of these operations, 0 to 30"""
    cutout: WholeNumber = 0
    """blacken a square of this many pixels a side around a random one"""
    mixup: Annotated[float, Bounds(least=0)] = 0.0
    """mix each training image with another of its batch, by shares from Beta(α, α): its α; 0.2 is
    customary"""

    def __post_init__(self) -> None:
        check_fields(self, "augment.")

    def check(self, images: Tensor) -> None:
        """Raise an error for images that these changes do not support."""
        if self.rand_augment and images.is_floating_point():
            raise ValueError(
                "augment.rand_augment works on the bytes of images, and these are floats: leave it "
                "out, or give images as uint8"
            )

    def __call__(self, images: Tensor, key: Tensor) -> Tensor:
        """`images` [C, B, channels, H, W] augmented, by one key [C] for each client and step."""
        # Imported here, since experiments are read without PyTorch.
        import torch

        from fedlens.core import keys
        from fedlens.data.augment.changes import (
            crop_and_flip,
            cut_out,
            jitter,
            rand_augment,
            resize_parts,
            rotate,
        )

        def rows(word: str) -> Tensor:  # [C, B]
            """A key for each image, for the change called `word`."""
            row = torch.arange(images.shape[1], device=images.device)
            return keys.fold(key[:, None], keys.purpose(word), row)

        if self.resized:
            images = resize_parts(images, rows("resize"), self.resized, self.aspect)
        if self.crop or self.flip:
            images = crop_and_flip(images, rows("augment"), self.crop, self.flip)
        if self.rotate:
            images = rotate(images, rows("rotate"), self.rotate)
        if self.brightness or self.contrast or self.saturation:
            most = self.brightness, self.contrast, self.saturation
            images = jitter(images, rows("color"), *most)
        if self.rand_augment:
            images = rand_augment(images, rows("rand_augment"), self.rand_augment, self.magnitude)
        if self.cutout:
            images = cut_out(images, rows("cutout"), self.cutout)
        return images

    def mixture(self, key: Tensor, counts: Tensor, size: int) -> Mixture | None:
        """How batches of `size` are mixed, or None; `counts` [C] of each batch are examples."""
        if not self.mixup:
            return None
        import torch

        from fedlens.core import keys
        from fedlens.data.augment.changes import mixture

        row = torch.arange(size, device=key.device)
        row_keys = keys.fold(key[:, None], keys.purpose("mixup"), row)
        return mixture(row_keys, counts, self.mixup)
