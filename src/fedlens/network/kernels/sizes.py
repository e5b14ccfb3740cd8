"""Sizes that the kernels share, and how a convolution is read."""

from __future__ import annotations

from typing import Literal, NamedTuple

from torch import Tensor

from fedlens.network.pool import Windows
from fedlens.network.stacked.products import Padding

PROGRAMS = 264  # twice the processors of a large GPU: as many as keep it busy
SHARED_MEMORY = 160 * 1024  # bytes that a program can have on an A100; an H100 has more


def tile(number: int) -> int:
    """The least power of two that holds `number`, and 16 at the least, as `tl.dot` wants it."""
    return max(16, 1 << (number - 1).bit_length())


class Drops(NamedTuple):
    """Dropout of a result: a word that is folded into the keys, and its share of 2^16 positions."""

    word: int = 0
    num_dropped: int = 0

    @property
    def scale(self) -> float:
        """What the others are multiplied by."""
        return 2**16 / (2**16 - self.num_dropped)


class Geometry(NamedTuple):
    """A convolution: the size of its kernels, its stride, and what is computed after it."""

    size: tuple[int, int]
    stride: tuple[int, int] = (1, 1)
    relu: bool = False
    pool: Windows | None = None  # whose maximum is computed
    drops: Drops = Drops()  # only with pooling

    @property
    def epilogue(self) -> Literal["plain", "relu", "pool"]:
        """What the grads of the result are brought back through."""
        return "pool" if self.pool is not None else "relu" if self.relu else "plain"


NO_PADDING: Padding = (0, 0, 0, 0)


class Sizes(NamedTuple):
    """The sizes of a convolution that its kernels are compiled for."""

    rows: int  # of a result, after pooling if there is any
    columns: int
    tall: int  # rows of an image, as it is stored
    wide: int  # columns of an image
    channels: int
    width: int  # columns of the kernel
    taps: int  # rows times columns of the kernel
    outs: int
    down: int  # the stride
    right: int
    top: int  # rows of padding that are not stored, but masked
    left: int  # columns of padding


class Frame(NamedTuple):
    """Rows and columns of grads that are stored within a border of zeros."""

    tall: int  # with the border
    wide: int
    top: int  # rows of the border above
    left: int  # columns of the border beside


def by_taps(channels: int) -> bool:
    """Whether images of this many channels are read by taps, and need no border in memory."""
    return channels % 16 == 0


def spare_channels(size: tuple[int, int], channels: int) -> int:
    """How many channels of zeros make loads wider where they cost no larger tile."""
    more, taps = -channels % 4, size[0] * size[1]
    worth = 1 < channels < 16 and tile(taps * (channels + more)) == tile(taps * channels)
    return more if worth else 0


def result_size(
    images: Tensor, geometry: Geometry, padding: Padding = NO_PADDING
) -> tuple[int, int]:
    """Rows and columns of what a convolution gives, before pooling."""
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
    """The sizes of a convolution of images [N, H, W, channels] to this many rows and columns."""
    _, tall, wide, channels = images.shape
    (height, width), (left, _, top, _) = geometry.size, padding
    taps, (rows, columns) = height * width, result
    return Sizes(
        rows, columns, tall, wide, channels, width, taps, outs, *geometry.stride, top, left
    )
