"""Convolutions of 3 x 3 by tiles of 4 x 4 results, each computed from 6 x 6 pixels.

The method that `winograd.py` applies along the height is applied along both sides here,

    y = results @ ((kernels @ w @ kernels') * (images @ x @ images')) @ results',

which takes 36 multiplications a tile instead of 144. Values are stored point by point, as
[6, 6, B, down, across, channels], so that the sum over channels is one batched product. A matrix is
applied to both sides as a small matrix times a long one, along the height and then the width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

SIDE = 4  # rows and columns of a tile of results
OVERLAP = 2  # rows or columns of pixels that a tile shares with the next one


class Values(NamedTuple):
    """The matrices that transform one side to values at 6 points, and back to results."""

    images: Tensor  # [6, 6] from the pixels of a tile to values
    kernels: Tensor  # [6, 3] from a kernel to values
    results: Tensor  # [4, 6] from values to a tile of results


def convolve(
    x: Tensor, weight: Tensor, padding: tuple[int, int], values: Values
) -> tuple[Tensor, Tensor, Tensor]:
    """The result, and the values of images [36, B * tiles, channels] and kernels for backward."""
    out, channels, *_ = weight.shape
    kernels = _along_both(values.kernels, weight.permute(2, 3, 1, 0)).view(36, channels, out)
    read = _tiles_read(x, padding)
    images = _along_both(values.images, read).view(36, -1, channels)
    found = _along_both(values.results, torch.bmm(images, kernels).view(6, 6, -1))
    _, _, size, down, across, _ = read.shape
    whole = x.new_empty(size, down, SIDE, across, SIDE, out)
    whole.copy_(found.view(SIDE, SIDE, size, down, across, out).permute(2, 3, 0, 4, 1, 5))
    height, width = (n + 2 * (p - 1) for n, p in zip(x.shape[2:], padding, strict=True))
    whole = whole.view(size, down * SIDE, across * SIDE, out)[:, :height, :width]
    return whole.contiguous().permute(0, 3, 1, 2), images, kernels


def gradients(
    grad: Tensor,
    x: Tensor,
    images: Tensor,
    kernels: Tensor,
    padding: tuple[int, int],
    values: Values,
    first: bool,
) -> tuple[Tensor | None, Tensor]:
    """The gradients of the images (None for a `first` layer) and of the weights."""
    _, channels, out = kernels.shape
    size, _, height, width = grad.shape
    down, across = -(-height // SIDE), -(-width // SIDE)
    whole = grad.permute(0, 2, 3, 1)
    if (down * SIDE, across * SIDE) != (height, width):
        whole = F.pad(whole, (0, 0, 0, across * SIDE - width, 0, down * SIDE - height))
    tiles = whole.view(size, down, SIDE, across, SIDE, out).permute(2, 4, 0, 1, 3, 5)
    at_points = _along_both(values.results.T, tiles).view(36, -1, out)
    dw = _along_both(values.kernels.T, torch.bmm(images.transpose(1, 2), at_points).view(6, 6, -1))
    dw = dw.view(3, 3, channels, out).permute(3, 2, 0, 1)
    if first:
        return None, dw
    read = _along_both(
        values.images.T, torch.bmm(at_points, kernels.transpose(1, 2)).view(6, 6, -1)
    )
    dx = _overlap_added(read.view(6, 6, size, down, across, channels))
    (above, beside), (_, _, height, width) = padding, x.shape
    dx = dx[:, above : above + height, beside : beside + width]
    return dx.permute(0, 3, 1, 2), dw


def _along_both(matrix: Tensor, sides: Tensor) -> Tensor:
    """`matrix` [m, n] times `sides` [n, n, ...], along the first and second axes: [m, m, N]."""
    m, n = matrix.shape
    rows = (matrix @ sides.reshape(n, -1)).view(m, n, -1)
    return torch.bmm(matrix.expand(m, m, n), rows)


def _tiles_read(x: Tensor, padding: tuple[int, int]) -> Tensor:
    """The pixels of tiles: [6, 6, B, down, across, channels], a view if no padding is needed."""
    pads = [0, 0]
    for count, pad in zip(reversed(x.shape[2:]), reversed(padding), strict=True):
        tiles = -(-(count + 2 * pad - OVERLAP) // SIDE)
        pads += [pad, tiles * SIDE + OVERLAP - count - pad]
    pixels = x.permute(0, 2, 3, 1)
    pixels = F.pad(pixels, pads) if any(pads) else pixels
    side = SIDE + OVERLAP
    return pixels.unfold(1, side, SIDE).unfold(2, side, SIDE).permute(4, 5, 0, 1, 2, 3)


def _overlap_added(read: Tensor) -> Tensor:
    """Images [B, height, width, channels] as the sum of their overlapping tiles."""
    _, _, size, down, across, channels = read.shape
    whole = read.new_empty(size, down + 1, SIDE, across + 1, SIDE, channels)
    own, next_ = slice(SIDE), slice(SIDE, None)
    read = read.permute(2, 3, 0, 4, 1, 5)  # [B, down, 6, across, 6, channels]
    whole[:, -1] = 0
    whole[:, :-1, :, -1] = 0
    whole[:, :-1, :, :-1] = read[:, :, own, :, own]
    whole[:, :-1, :, 1:, :OVERLAP] += read[:, :, own, :, next_]
    whole[:, 1:, :OVERLAP, :-1] += read[:, :, next_, :, own]
    whole[:, 1:, :OVERLAP, 1:, :OVERLAP] += read[:, :, next_, :, next_]
    return whole.view(size, (down + 1) * SIDE, (across + 1) * SIDE, channels)
