"""Triton kernel for convolutions of C clients, then max-pooling, and optional ReLU and dropout.

With the sums over patches of `convolution.py`, for window m and its four corners p,

    out[c, m, n] = max over p of (sum over k of patch[c, p, k] * kernel[c, k, n]) + bias[c, n]

See `convolution.py` for how images and kernels are stored and read. For the backward pass the
winner of each window is stored: which of its corners had the maximum. A window whose result ReLU or
dropout sets to 0 has no winner: no gradient passes through it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedlens.network.kernels.convolution import position_of
from fedlens.network.kernels.dropout import kept_positions
from fedlens.network.kernels.launch import launchable
from fedlens.network.kernels.sizes import (
    Geometry,
    by_taps,
    result_size,
    shared_memory,
    sizes_of,
    tile,
)
from fedlens.network.stacked.products import Padding

DEAD = 4  # in place of a winner, for a window without one

_DEAD = tl.constexpr(DEAD)


@launchable
def _pooled_kernel(
    images, kernel, bias, client_keys, out, winners, batch, rows, columns, word,
    s: tl.constexpr, windows: tl.constexpr, TAPS: tl.constexpr, BORDER: tl.constexpr,
    HAS_BIAS: tl.constexpr, RELU: tl.constexpr, NUM_DROPPED: tl.constexpr, SCALE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """The maximum of windows of 2 x 2 positions: out[c, m, n] and winners[c, m, n] of window m.

    Blocks are those of `_product_kernel`, but m is a window. A program has sums for each corner of
    its windows: 0 and 1 above, 2 and 3 below. It loads by taps or by runs. Corners outside the
    `rows` and `columns` of positions are padding. Dropout, if any, sets NUM_DROPPED of 2^16 results
    to 0: their windows have no winner. It multiplies the others by SCALE.
    """
    client = tl.program_id(1).to(tl.int64)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(2) * BN + tl.arange(0, BN)
    total = batch * s.rows * s.columns
    inside = m < total
    image, row, column = position_of(m, s.rows, s.columns)
    row, column = 2 * row - windows.top, 2 * column - windows.left
    upper, lower, first, second = inside, inside, inside, inside
    padded: tl.constexpr = windows.top + windows.left > 0
    if padded:
        upper, lower = inside & (row >= 0), inside & (row + 1 < rows)
        first, second = inside & (column >= 0), inside & (column + 1 < columns)
    row, column = row * s.down - s.top, column * s.right - s.left
    images += client * batch * s.tall * s.wide * s.channels
    start = ((image * s.tall + row) * s.wide + column) * s.channels
    depth: tl.constexpr = s.taps * s.channels
    weights = kernel + client * depth * s.outs
    c = tl.arange(0, BK)
    sums0 = tl.zeros((BM, BN), tl.float32)
    sums1 = tl.zeros((BM, BN), tl.float32)
    sums2 = tl.zeros((BM, BN), tl.float32)
    sums3 = tl.zeros((BM, BN), tl.float32)
    below: tl.constexpr = s.down * s.wide * s.channels
    beside: tl.constexpr = s.right * s.channels
    for step in range(tl.cdiv(depth, BK)):
        k = step * BK + c
        w = tl.load(
            weights + k[:, None] * s.outs + n[None, :],
            mask=(k < depth)[:, None] & (n < s.outs)[None, :], other=0.0,
        )  # fmt: skip
        if TAPS:
            blocks: tl.constexpr = s.channels // BK
            tap = step // blocks
            shift = (tap // s.width * s.wide + tap % s.width) * s.channels + step % blocks * BK
            p = images + (start + shift)[:, None] + c[None, :]
            up, low, near, far = upper, lower, first, second
            if BORDER:
                r, q = row + tap // s.width, column + tap % s.width
                up &= (r >= 0) & (r < s.tall)
                low &= (r + s.down >= 0) & (r + s.down < s.tall)
                near &= (q >= 0) & (q < s.wide)
                far &= (q + s.right >= 0) & (q + s.right < s.wide)
            in0, in1 = (up & near)[:, None], (up & far)[:, None]
            in2, in3 = (low & near)[:, None], (low & far)[:, None]
        else:
            run: tl.constexpr = s.width * s.channels
            p = images + start[:, None] + ((k // run) * s.wide * s.channels + k % run)[None, :]
            within = (k < depth)[None, :]
            in0, in1 = (upper & first)[:, None] & within, (upper & second)[:, None] & within
            in2, in3 = (lower & first)[:, None] & within, (lower & second)[:, None] & within
        sums0 = _add_product(sums0, p, in0, w)
        sums1 = _add_product(sums1, p + beside, in1, w)
        sums2 = _add_product(sums2, p + below, in2, w)
        sums3 = _add_product(sums3, p + below + beside, in3, w)
    if padded:
        sums0 = tl.where((upper & first)[:, None], sums0, float("-inf"))
        sums1 = tl.where((upper & second)[:, None], sums1, float("-inf"))
        sums2 = tl.where((lower & first)[:, None], sums2, float("-inf"))
        sums3 = tl.where((lower & second)[:, None], sums3, float("-inf"))
    best, corner = _greatest(sums0, sums1, sums2, sums3)
    if HAS_BIAS:
        b = tl.load(bias + client * s.outs + n, mask=n < s.outs, other=0.0)
        best += b.to(tl.float32)[None, :]
    if RELU:
        corner = tl.where(best > 0, corner, _DEAD)
        best = tl.maximum(best, 0.0, propagate_nan=tl.PropagateNan.ALL)
    if NUM_DROPPED > 0:
        first = (m - image * s.rows * s.columns) * s.outs + tl.program_id(2) * BN
        kept = kept_positions(client_keys, client, word, image, first, NUM_DROPPED, BM, BN)
        corner = tl.where(kept, corner, _DEAD)
        best = tl.where(kept, best * SCALE, 0.0)
    entry = (client * total + m)[:, None] * s.outs + n[None, :]
    there = inside[:, None] & (n < s.outs)[None, :]
    tl.store(winners + entry, corner.to(tl.uint8), mask=there)
    tl.store(out + entry, best.to(out.dtype.element_ty), mask=there)


@triton.jit
def _add_product(sums, p, inside, w):
    """sums + x w, with x loaded from p where `inside`."""
    x = tl.load(p, mask=inside, other=0.0)
    return tl.dot(x, w, sums, input_precision="tf32")


@triton.jit
def _greatest(sums0, sums1, sums2, sums3):
    """The maximum of four, and its index: the first, if several are equal."""
    upper = tl.maximum(sums0, sums1, propagate_nan=tl.PropagateNan.ALL)
    lower = tl.maximum(sums2, sums3, propagate_nan=tl.PropagateNan.ALL)
    best = tl.maximum(upper, lower, propagate_nan=tl.PropagateNan.ALL)
    corner = tl.where(
        upper >= lower, tl.where(sums0 >= sums1, 0, 1), tl.where(sums2 >= sums3, 2, 3)
    )
    return best, corner


def pooled_product(
    images: Tensor, kernel: Tensor, bias: Tensor | None, client_keys: Tensor | None,
    geometry: Geometry, padding: Padding,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`convolution.product` with pooling, and the winners: [C * B, H', W', out] each.

    For dropout, `client_keys` are [C].
    """
    rows, columns = result_size(images, geometry, padding)
    windows, drops = geometry.pool, geometry.drops
    assert windows is not None
    down, across = windows.number(rows, columns)
    out = images.new_empty(len(images), down, across, kernel.shape[2])
    winners = torch.empty_like(out, dtype=torch.uint8)
    clients, batch = len(kernel), len(images) // len(kernel)
    s = sizes_of(images, (down, across), kernel.shape[2], geometry, padding)
    wide_tile, taps = min(tile(s.outs), 64), by_taps(s.channels)
    deep = 32 if s.channels % 32 == 0 else 16 if taps else min(tile(s.taps * s.channels), 128)
    loaded = (4 * 64 + wide_tile) * deep * images.element_size()  # bytes of a step: four corners
    stages = max(1, min(shared_memory(images.device) // loaded, 3))
    grid = triton.cdiv(batch * s.rows * s.columns, 64), clients, triton.cdiv(s.outs, wide_tile)
    _pooled_kernel[grid](
        images, kernel, kernel if bias is None else bias,
        winners if client_keys is None else client_keys, out, winners, batch, rows, columns,
        drops.word, s, windows, TAPS=taps, BORDER=any(padding), HAS_BIAS=bias is not None,
        RELU=geometry.relu, NUM_DROPPED=drops.num_dropped, SCALE=drops.scale, BM=64, BN=wide_tile,
        BK=deep, num_warps=4, num_stages=stages,
    )  # fmt: skip
    return out, winners
