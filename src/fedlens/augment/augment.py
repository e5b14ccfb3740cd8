"""The `augment` table of an experiment: which changes a batch goes through, in which order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from fedlens.options import Bounds
from fedlens.sections import Chance, Factor, WholeNumber, settle

if TYPE_CHECKING:
    from torch import Tensor

    from fedlens.augment.mixup import Mixture


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

    crop: WholeNumber = 0
    """pad training images by this many pixels on each side, and crop at random: see
    [Augmentation](#augmentation)"""
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
        settle(self, "augment.")

    def check(self, images: Tensor) -> None:
        """Raise an error for images that these changes do not support."""
        if self.rand_augment and images.is_floating_point():
            raise ValueError(
                "augment.rand_augment works on the bytes of images, and these are floats: leave it "
                "out, or give images as uint8"
            )

    # An experiment is read without PyTorch, which these two import.

    def __call__(self, images: Tensor, key: Tensor) -> Tensor:
        """`images` [C, B, channels, H, W] augmented, by one key [C] for each client and step."""
        from fedlens.augment.changes import changed

        return changed(self, images, key)

    def mixture(self, key: Tensor, counts: Tensor, size: int) -> Mixture | None:
        """How batches of `size` are mixed, or None; `counts` [C] of each batch are examples."""
        from fedlens.augment.changes import mixture_of

        return mixture_of(self, key, counts, size)
