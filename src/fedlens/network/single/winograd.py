"""Convolutions with fewer multiplications (Toom, Cook, Winograd), for one client on a CPU.

Four rows y of the result of a kernel of five rows depend on P = 8 rows x of the image:

    y = results @ ((kernels @ w) * (images @ x))

with the matrices of `Values`: rows of images and of kernels become values of polynomials at P
points, are multiplied there, and become rows again. That is 8 multiplications instead of 20. Each
point is a group of channels in one convolution along the width. Kernels of three rows would gain
too little. Sums are rounded differently: in float32 the error is two to three times that of the
plain convolution.

Images are stored channels last, so that each of their rows is contiguous in memory.
"""

from __future__ import annotations

from fractions import Fraction
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

KERNEL = 5  # rows of a kernel
ROWS = 4  # of the result that are computed together, as a tile
OVERLAP = KERNEL - 1  # rows of the image that a tile shares with the next one
# Infinity is the last point. Of the points tried, these round best.
FINITE = "0 1 -1 2 -2 1/2 -1/2"
POINTS = ROWS + OVERLAP
MOVING = 90  # multiplications that take as long as transforming a number to values and back

aten = torch.ops.aten


class Values(NamedTuple):
    """The matrices that transform one side to values at P points, and back to results."""

    images: Tensor  # [P, P] from the rows of a tile to values
    kernels: Tensor  # [P, 5] from the rows of a kernel to values
    results: Tensor  # [4, P] from values to the rows of a tile of results


class Shape(NamedTuple):
    """The sizes of a convolution of B images with weights [out, channels, 5, k]."""

    size: int  # B
    channels: int
    height: int
    width: int
    out: int
    columns: int  # k
    above: int  # rows of padding
    beside: int  # columns of padding

    @classmethod
    def of(cls, x: Tensor, weight: Tensor, padding: tuple[int, int]) -> Shape:
        out, _, _, columns = weight.shape
        size, channels, height, width = x.shape
        return cls(size, channels, height, width, out, columns, *padding)

    @property
    def tiles(self) -> int:
        return -(-self.out_height // ROWS)

    @property
    def out_height(self) -> int:
        return self.height + 2 * self.above - OVERLAP

    @property
    def out_width(self) -> int:
        return self.width + 2 * self.beside - self.columns + 1


def suits(x: Tensor, weight: Tensor, geometry: tuple[Any, ...]) -> bool:
    """Whether a convolution can be computed here, and is faster than the plain one."""
    stride, padding, dilation, groups = geometry
    plain = stride == (1, 1) and dilation == (1, 1) and groups == 1
    wide = x.dtype in (torch.float32, torch.float64)
    if not (plain and weight.shape[2] == KERNEL and x.device.type == "cpu" and wide):
        return False
    shape = Shape.of(x, weight, padding)
    if shape.out_height < 1 or not x.is_contiguous(memory_format=torch.channels_last):
        return False
    spared = KERNEL - POINTS * shape.tiles / shape.out_height
    products = shape.out * shape.channels * shape.columns * spared  # for each pixel
    pixels = shape.size * shape.out_height * shape.out_width
    moves_weights_too_much = pixels < 2 * max(shape.out, shape.channels)
    return not moves_weights_too_much and products >= MOVING * (shape.out + shape.channels)


def lay_out(kernels: Tensor) -> Tensor:
    """The same kernels [C, out, channels, 5, k], stored in the order 5, out, k, channels."""
    return kernels.permute(0, 3, 1, 4, 2).contiguous().permute(0, 2, 4, 1, 3)


class Seen(NamedTuple):
    """Values at points, which the backward pass uses again; both are stored channels last."""

    images: Tensor  # [B, P * channels, tiles, W]
    kernels: Tensor  # [P * out, channels, 1, k]


def convolve(x: Tensor, weight: Tensor, padding: tuple[int, int]) -> tuple[Tensor, Seen]:
    """The result without a bias, and the values at points for the backward pass."""
    shape = Shape.of(x, weight, padding)
    values = _values(weight.dtype)
    images = _as_channels(values.images @ _image_rows(x, shape), shape.width, shape)
    seen = Seen(images, _kernels(weight, values))
    made = aten.convolution(*seen, None, *_geometry(shape))
    rows = values.results @ _as_values(made)
    rows = rows.view(ROWS, shape.size, shape.tiles, -1).permute(1, 2, 0, 3)
    whole = rows.reshape(shape.size, -1, shape.out_width, shape.out)
    return whole[:, : shape.out_height].contiguous().permute(0, 3, 1, 2), seen


def gradients(
    grad: Tensor, x: Tensor, seen: Seen, weight: Tensor, padding: tuple[int, int], first: bool
) -> tuple[Tensor | None, Tensor]:
    """The gradients of the images (None for a `first` layer) and of the weights."""
    shape = Shape.of(x, weight, padding)
    values = _values(weight.dtype)
    at_points = _as_channels(values.results.T @ _result_rows(grad, shape), shape.out_width, shape)
    images, kernels, _ = aten.convolution_backward(
        at_points, *seen, None, *_geometry(shape), [not first, True, False]
    )
    dw = values.kernels.T @ kernels.permute(0, 2, 3, 1).reshape(POINTS, -1)
    dw = dw.view(KERNEL, shape.out, shape.columns, shape.channels).permute(1, 3, 0, 2)
    if first:
        return None, dw
    rows = values.images.T @ _as_values(images)
    return _overlap_added(rows.view(len(rows), shape.size, shape.tiles, -1), shape), dw


def _geometry(shape: Shape) -> tuple[Any, ...]:
    """The geometry of a convolution along the width, with each point a group of channels."""
    return (1, 1), (0, shape.beside), (1, 1), False, (0, 0), POINTS


def _image_rows(x: Tensor, shape: Shape) -> Tensor:
    """The image rows of all tiles, ordered by row within a tile: [P, B * tiles * W * channels]."""
    rows = x.permute(0, 2, 3, 1).reshape(shape.size, shape.height, -1)
    rows = _padded(rows, shape.above, shape.tiles * ROWS + OVERLAP)
    tiles = rows.unfold(1, POINTS, ROWS)  # [B, tiles, W * channels, P]
    return tiles.permute(3, 0, 1, 2).reshape(POINTS, -1)


def _result_rows(grad: Tensor, shape: Shape) -> Tensor:
    """The result rows of all tiles, ordered by row within a tile: [ROWS, B * tiles * W * out]."""
    rows = grad.permute(0, 2, 3, 1).reshape(shape.size, shape.out_height, -1)
    rows = _padded(rows, 0, shape.tiles * ROWS).view(shape.size, shape.tiles, ROWS, -1)
    return rows.permute(2, 0, 1, 3).reshape(ROWS, -1)


def _padded(rows: Tensor, above: int, count: int) -> Tensor:
    """`count` rows of each image: `above` rows of zeros, the image, and zeros below it."""
    size, height, width = rows.shape
    if height == count:
        return rows
    whole = rows.new_empty(size, count, width)
    whole[:, :above] = 0
    whole[:, above : above + height] = rows[:, : count - above]
    whole[:, above + height :] = 0
    return whole


def _overlap_added(rows: Tensor, shape: Shape) -> Tensor:
    """The images as the sum of their overlapping tiles [P, B, tiles, W * channels]."""
    whole = rows.new_empty(shape.size, shape.tiles + 1, ROWS, rows.shape[3])
    whole[:, :-1] = rows[:ROWS].permute(1, 2, 0, 3)
    whole[:, -1] = 0
    whole[:, 1:, :OVERLAP] += rows[ROWS:].permute(1, 2, 0, 3)
    whole = whole.view(shape.size, -1, shape.width, shape.channels)
    return whole[:, shape.above : shape.above + shape.height].permute(0, 3, 1, 2)


def _kernels(weight: Tensor, values: Values) -> Tensor:
    """The values of kernels [P * out, channels, 1, k'], channels last."""
    _, channels, _, columns = weight.shape
    found = values.kernels @ weight.permute(2, 0, 3, 1).reshape(KERNEL, -1)
    return found.view(-1, 1, columns, channels).permute(0, 3, 1, 2)


def _as_channels(found: Tensor, width: int, shape: Shape) -> Tensor:
    """Values [P, B * tiles * W * n] as images [B, P * n, tiles, W], channels last."""
    by_point = found.view(POINTS, shape.size * shape.tiles * width, -1)
    mixed = by_point.transpose(0, 1).reshape(shape.size, shape.tiles, width, -1)
    return mixed.permute(0, 3, 1, 2)


def _as_values(images: Tensor) -> Tensor:
    """Images [B, P * n, tiles, W], channels last, as values [P, B * tiles * W * n]."""
    by_point = images.permute(0, 2, 3, 1).reshape(-1, POINTS, images.shape[1] // POINTS)
    return by_point.transpose(0, 1).reshape(POINTS, -1)


@lru_cache
def _values(dtype: torch.dtype) -> Values:
    """The Toom-Cook matrices."""
    points = [Fraction(p) for p in FINITE.split()]

    def at_points(count: int) -> Tensor:
        """From `count` coefficients of a polynomial to its values; at infinity the last one."""
        last = [Fraction(0)] * (count - 1) + [Fraction(1)]
        powers = [[p**j for j in range(count)] for p in points] + [last]
        return torch.tensor([[float(v) for v in row] for row in powers], dtype=torch.float64)

    images = at_points(POINTS).inverse().T
    found = images, at_points(KERNEL), at_points(ROWS).T
    return Values(*(matrix.to(dtype).contiguous() for matrix in found))
