"""Sizes that the kernels share, and the geometry of a convolution."""

from __future__ import annotations

from functools import cache
from typing import Literal, NamedTuple

import torch
import triton
from torch import Tensor

from fedlens.network.pool import Windows
from fedlens.network.stacked.products import Padding

PROGRAMS = 264  # twice the multiprocessors of a large GPU: enough to keep it busy
SHARED_MEMORY = 160 * 1024  # bytes that a program can use on an A100; an H100 has more


@cache
def shared_memory(device: torch.device) -> int:
    """The bytes that a program can use on this GPU."""
    if device.type != "cuda":
        return SHARED_MEMORY
    limits = triton.runtime.driver.active.utils.get_device_properties(device.index)
    return int(limits["max_shared_mem"])


def tile(number: int) -> int:
    """The smallest power of two that is at least `number` and at least 16, which `tl.dot` needs."""
    return max(16, 1 << (number - 1).bit_length())


class Drops(NamedTuple):
    """Dropout of a result: the word folded into the keys, and how many of 2^16 positions drop."""

    word: int = 0
    num_dropped: int = 0

    @property
    def scale(self) -> float:
        """The factor of the kept positions."""
        return 2**16 / (2**16 - self.num_dropped)


class Geometry(NamedTuple):
    """A convolution: the size of its kernels, its stride, and the operations that follow it."""

    size: tuple[int, int]
    stride: tuple[int, int] = (1, 1)
    relu: bool = False
    pool: Windows | None = None  # of the max-pooling
    drops: Drops = Drops()  # only with pooling

    @property
    def epilogue(self) -> Literal["plain", "relu", "pool"]:
        """The kind of operation that grads of the result pass through before the convolution."""
        return "pool" if self.pool is not None else "relu" if self.relu else "plain"


NO_PADDING: Padding = (0, 0, 0, 0)


class Sizes(NamedTuple):
    """The sizes of a convolution that its kernels are compiled for."""

    rows: int  # of the result, after pooling if there is any
    columns: int
    tall: int  # rows of a stored image
    wide: int  # columns of a stored image
    channels: int
    width: int  # columns of the kernel
    taps: int  # rows times columns of the kernel
    outs: int  # output channels
    down: int  # the stride
    right: int
    top: int  # rows of padding that is masked, not stored
    left: int  # columns of such padding


class Frame(NamedTuple):
    """Sizes of grads that are stored with a border of zeros."""

    tall: int  # rows with the border
    wide: int  # columns with the border
    top: int  # rows of the border above
    left: int  # columns of the border on the left


def by_taps(channels: int) -> bool:
    """Whether images of this many channels are read by taps, and so need no stored padding."""
    return channels % 16 == 0


def spare_channels(size: tuple[int, int], channels: int) -> int:
    """How many channels of zeros to add for wider loads, if the tile does not become larger."""
    more, taps = -channels % 4, size[0] * size[1]
    worth = 1 < channels < 16 and tile(taps * (channels + more)) == tile(taps * channels)
    return more if worth else 0


def result_size(
    images: Tensor, geometry: Geometry, padding: Padding = NO_PADDING
) -> tuple[int, int]:
    """Rows and columns of a convolution's result, before pooling."""
    left, right, top, bottom = padding
    _, tall, wide, _ = images.shape
    sides = zip(
        (tall + top + bottom, wide + left + right), geometry.size, geometry.stride, strict=True
    )
    rows, columns = ((side - size) // step + 1 for side, size, step in sides)
    return rows, columns


def sizes_of(
    images: Tensor, result: tuple[int, int], outs: int, geometry: Geometry,
    padding: Padding = NO_PADDING,
) -> Sizes:  # fmt: skip
    """The sizes of a convolution of images [N, H, W, channels] with a result of this size."""
    _, tall, wide, channels = images.shape
    (height, width), (left, _, top, _) = geometry.size, padding
    taps, (rows, columns) = height * width, result
    return Sizes(
        rows, columns, tall, wide, channels, width, taps, outs, *geometry.stride, top, left
    )
