"""The `augment` table of an experiment: which changes a batch goes through, in which order."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedlens import keys
from fedlens.augment.colors import jitter
from fedlens.augment.crops import crop_and_flip, cut_out, resize_parts
from fedlens.augment.mixup import Mixture, mixture
from fedlens.augment.rand_augment import LARGEST, rand_augment
from fedlens.augment.warp import rotate


@dataclass(frozen=True)
class Augment:
    """Random changes of training images, in the order in which they happen:

    - a random part of each image, between the share `resized` of its area and all of it and between
      `aspect` and 1 / `aspect` in shape, is stretched to the whole (for images of 224 px and the
      like; 0.08 and 4 / 3 are customary);
    - crops of images padded by `crop` zeros on each side, and mirror images (`flip`);
    - rotation by up to `rotate` degrees either way, with zeros in the corners;
    - `brightness`, `contrast` and `saturation` times a factor between 1 - x and 1 + x each;
    - `rand_augment` operations of RandAugment, each of this `magnitude`;
    - a square of `cutout` pixels of zeros;
    - `mixup` of two images of the batch, by shares from Beta(mixup, mixup).

    What happens to an image depends on its client's key and on its row in the batch, never on
    which other clients are beside it.
    """

    crop: int = 0
    flip: bool = False
    resized: float = 0.0
    aspect: float = 4 / 3
    rotate: float = 0.0
    brightness: float = 0.0
    contrast: float = 0.0
    saturation: float = 0.0
    rand_augment: int = 0
    magnitude: float = 9.0
    cutout: int = 0
    mixup: float = 0.0

    def __post_init__(self) -> None:
        pixels = "choose how many pixels to pad, 0 for none"
        _demand(self.crop >= 0, "crop", self.crop, pixels)
        area = "choose a share of the area, 0 for none"
        _demand(0 <= self.resized <= 1, "resized", self.resized, area)
        _demand(1 <= self.aspect < float("inf"), "aspect", self.aspect, "choose 1 or more")
        _demand(0 <= self.rotate <= 180, "rotate", self.rotate, "choose degrees from 0 to 180")
        for name in ("brightness", "contrast", "saturation"):
            value = getattr(self, name)
            _demand(0 <= value <= 10, name, value, "choose a number from 0 to 10, 0 for none")
        count = "choose how many operations, 0 for none"
        _demand(0 <= self.rand_augment <= 20, "rand_augment", self.rand_augment, count)
        strength = f"choose 0 to {LARGEST}"
        _demand(0 <= self.magnitude <= LARGEST, "magnitude", self.magnitude, strength)
        _demand(self.cutout >= 0, "cutout", self.cutout, "choose how many pixels, 0 for none")
        alpha = "choose the alpha of a Beta distribution, 0 for none"
        _demand(0 <= self.mixup < float("inf"), "mixup", self.mixup, alpha)

    def check(self, images: Tensor) -> None:
        """Raise an error for images that these changes do not support."""
        if self.rand_augment and images.is_floating_point():
            raise ValueError(
                "augment.rand_augment works on the bytes of images, and these are floats: leave it "
                "out, or give images as uint8"
            )

    def __call__(self, images: Tensor, key: Tensor) -> Tensor:
        """`images` [C, B, channels, H, W] augmented, by one key [C] for each client and step."""

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
        row = torch.arange(size, device=key.device)
        row_keys = keys.fold(key[:, None], keys.purpose("mixup"), row)
        return mixture(row_keys, counts, self.mixup)


def _demand(fits: bool, key: str, value: float, remedy: str) -> None:
    if not fits:
        raise ValueError(f"augment.{key} is {value}: {remedy}")
