"""Triton kernel that adds a border to images or grads, and backpropagates ReLU and pooling."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedlens.network.kernels.launch import launchable
from fedlens.network.kernels.sizes import Frame, Geometry
from fedlens.network.pool import Windows
from fedlens.network.stacked.products import Padding


@triton.jit
def grads_before(
    grads, kept, image, row, column, n, inside,
    rows: tl.constexpr, columns: tl.constexpr, outs: tl.constexpr, KIND: tl.constexpr,
    windows: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """The grads [m, n] at a row and a column of each image m, before pooling or ReLU.

    `grads` and `kept` are [images, rows, columns, outs]. The grad of a position is

        grads at the position                                   if KIND is "plain"
        grads at the position where kept > 0, else 0            if KIND is "relu"
        SCALE * grads of its window if it won that, else 0      if KIND is "pool"

    and 0 outside. A position won its window if `kept` holds its corner; SCALE is that of dropout.
    """
    here = (n < outs)[None, :]
    if KIND == "pool":
        row, column = row + windows.top, column + windows.left
        inside &= (row < 2 * rows) & (column < 2 * columns)
        there = inside[:, None] & here
        window = ((image * rows + row // 2) * columns + column // 2).to(tl.int64)
        source = window[:, None] * outs + n[None, :]
        grad = tl.load(grads + source, mask=there, other=0.0)
        winner = tl.load(kept + source, mask=there, other=9)
        corner = (row % 2 * 2 + column % 2).to(tl.uint8)
        grad = tl.where(winner == corner[:, None], scaled(grad, SCALE), 0.0)
    else:
        inside &= (row < rows) & (column < columns)
        there = inside[:, None] & here
        source = ((image * rows + row) * columns + column).to(tl.int64)[:, None] * outs + n[None, :]
        grad = tl.load(grads + source, mask=there, other=0.0)
        if KIND == "relu":
            result = tl.load(kept + source, mask=there, other=0.0)
            grad = tl.where(result > 0, grad, 0.0)
    return grad


@triton.jit
def scaled(grad, SCALE: tl.constexpr):
    """grad * SCALE, in the dtype of the grads."""
    if SCALE != 1.0:
        grad = (grad.to(tl.float32) * SCALE).to(grad.dtype)
    return grad


@launchable
def _spread_kernel(
    grads, kept, out, count,
    rows: tl.constexpr, columns: tl.constexpr, outs: tl.constexpr, channels: tl.constexpr,
    frame: tl.constexpr, KIND: tl.constexpr, windows: tl.constexpr, SCALE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """out[m, n] = `grads_before` with a border of zeros, of [count, tall, wide, channels].

    Program (i, j) stores BM pixels m of block i and BN channels n of block j.
    """
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    image, pixel = m // (frame.tall * frame.wide), m % (frame.tall * frame.wide)
    row, column = pixel // frame.wide - frame.top, pixel % frame.wide - frame.left
    filled = m < count * frame.tall * frame.wide
    inside = filled & (row >= 0) & (column >= 0)
    grad = grads_before(
        grads, kept, image, row, column, n, inside, rows, columns, outs, KIND, windows, SCALE
    )
    store = filled[:, None] & (n < channels)[None, :]
    entry = m.to(tl.int64)[:, None] * channels + n[None, :]
    tl.store(out + entry, grad.to(out.dtype.element_ty), mask=store)


def through_epilogue(
    grads: Tensor, kept: Tensor | None, size: tuple[int, int], border: Padding, geometry: Geometry
) -> Tensor:
    """The grads before ReLU and pooling, [N, *size, out] plus a border, from those [N, ...] after.

    `kept` comes from the forward pass: the winners of pooling, else the result of ReLU.
    """
    kind, windows, scale = geometry.epilogue, geometry.pool, geometry.drops.scale
    return _spread(grads, kept, size, border, kind, grads.shape[3], windows, scale)


def padded(
    images: Tensor, padding: Padding, channels: int, dtype: torch.dtype | None = None
) -> Tensor:
    """Images [N, H, W, ...] with padding, and with channels of zeros appended up to `channels`.

    They are cast to `dtype` if it is given.
    """
    if not any(padding) and channels == images.shape[3] and dtype in (None, images.dtype):
        return images
    _, tall, wide, _ = images.shape
    return _spread(images, None, (tall, wide), padding, "plain", channels, dtype=dtype)


def _spread(
    grads: Tensor,
    kept: Tensor | None,
    size: tuple[int, int],
    border: Padding,
    kind: str,
    channels: int,
    windows: Windows | None = None,
    scale: float = 1.0,
    dtype: torch.dtype | None = None,
) -> Tensor:
    count, rows, columns, outs = grads.shape
    left, right, top, bottom = border
    frame = Frame(size[0] + top + bottom, size[1] + left + right, top, left)
    out = grads.new_empty(count, frame.tall, frame.wide, channels, dtype=dtype)
    wide_tile = min(int(triton.next_power_of_2(channels)), 128)
    block = 4096 // max(wide_tile, 8)
    grid = triton.cdiv(count * frame.tall * frame.wide, block), triton.cdiv(channels, wide_tile)
    _spread_kernel[grid](
        grads, grads if kept is None else kept, out, count, rows, columns, outs, channels, frame,
        KIND=kind, windows=windows or Windows(), SCALE=scale, BM=block, BN=wide_tile,
    )  # fmt: skip
    return out
