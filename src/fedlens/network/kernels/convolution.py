"""Triton kernels for convolutions of C clients, each with its own convolution kernels.

Images are [C * B, H, W, channels], kernels [C, h * w * channels, out], and results
[C * B, H', W', out]. An output position m of client c is an image b, a row i and a column j:

    m = (b * rows + i) * columns + j

Its patch has an entry k = (row of the kernel, column of the kernel, channel) for each weight, and

    out[c, m, n] = sum over k of patch[c, m, k] * kernel[c, k, n]  + bias[c, n]

Patches are never stored: a program loads those of its block from the images, in one of two ways:

- by taps, if 16 divides the channels: a block of k lies within one tap (a row and a column of the
  kernel), so that it is contiguous channels of one pixel; pixels outside the image are masked.
- by runs, if there are few channels: entry k of a patch is k // run rows of the image and
  k % run numbers after its first entry, with run = width of the kernel * channels. Images are
  stored with their padding.

A ReLU that follows is computed before the result is stored; `pooled.py` has the kernel of a
convolution followed by pooling.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fedlens.network.kernels.launch import launchable
from fedlens.network.kernels.sizes import (
    PROGRAMS,
    Geometry,
    by_taps,
    result_size,
    sizes_of,
    tile,
)
from fedlens.network.stacked.products import Padding


@triton.jit
def position_of(m, rows, columns):
    """The image, row and column of position m."""
    image, position = m // (rows * columns), m % (rows * columns)
    return image, position // columns, position % columns


@launchable
def _product_kernel(
    images, kernel, bias, out, batch,
    s: tl.constexpr, HAS_BIAS: tl.constexpr, RELU: tl.constexpr,
    EXACT: tl.constexpr,  # BK divides the depth: one mask less
    TURNED: tl.constexpr,  # flipped kernels of the backward pass: see `turned_product`
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """out[c, m, n] by runs. Program (i, c, j): BM positions of block i, BN outs of block j."""
    client = tl.program_id(1).to(tl.int64)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(2) * BN + tl.arange(0, BN)
    run: tl.constexpr = s.width * s.channels
    depth: tl.constexpr = s.taps * s.channels
    total = batch * s.rows * s.columns
    inside = (m < total)[:, None]
    image, row, column = position_of(m, s.rows, s.columns)
    start = images + client * batch * s.tall * s.wide * s.channels
    start += ((image * s.tall + row * s.down) * s.wide + column * s.right) * s.channels
    weights = kernel + client * depth * s.outs
    sums = tl.zeros((BM, BN), tl.float32)
    for first in range(0, depth, BK):
        k = first + tl.arange(0, BK)
        shift = (k // run) * s.wide * s.channels + k % run
        if TURNED:
            tap = depth // s.channels - 1 - k // s.channels
            entry = (tap * s.outs)[:, None] + n[None, :]
            entry = entry * s.channels + (k % s.channels)[:, None]
        else:
            entry = k[:, None] * s.outs + n[None, :]
        if EXACT:
            a = tl.load(start[:, None] + shift[None, :], mask=inside, other=0.0)
            b = tl.load(weights + entry, mask=(n < s.outs)[None, :], other=0.0)
        else:
            there = inside & (k < depth)[None, :]
            a = tl.load(start[:, None] + shift[None, :], mask=there, other=0.0)
            there = (k < depth)[:, None] & (n < s.outs)[None, :]
            b = tl.load(weights + entry, mask=there, other=0.0)
        sums = tl.dot(a, b, sums, input_precision="tf32")
    _finish(sums, bias, out, client, m, n, total, s.outs, HAS_BIAS, RELU)


@launchable
def _taps_kernel(
    images, kernel, bias, out, batch,
    s: tl.constexpr, BORDER: tl.constexpr, HAS_BIAS: tl.constexpr, RELU: tl.constexpr,
    TURNED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """out[c, m, n] by taps, BK channels at a time, with the blocks of `_product_kernel`."""
    client = tl.program_id(1).to(tl.int64)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(2) * BN + tl.arange(0, BN)
    total = batch * s.rows * s.columns
    image, row, column = position_of(m, s.rows, s.columns)
    row, column = row * s.down - s.top, column * s.right - s.left
    images += client * batch * s.tall * s.wide * s.channels
    start = ((image * s.tall + row) * s.wide + column) * s.channels
    weights = kernel + client * s.taps * s.channels * s.outs
    c = tl.arange(0, BK)
    blocks: tl.constexpr = s.channels // BK
    sums = tl.zeros((BM, BN), tl.float32)
    for step in range(s.taps * blocks):
        tap, first = step // blocks, step % blocks * BK
        down_by, right_by = tap // s.width, tap % s.width
        inside = m < total
        if BORDER:
            r, q = row + down_by, column + right_by
            inside &= (r >= 0) & (r < s.tall) & (q >= 0) & (q < s.wide)
        shift = (down_by * s.wide + right_by) * s.channels + first
        a = tl.load(images + (start + shift)[:, None] + c[None, :], mask=inside[:, None], other=0.0)
        k = first + c
        if TURNED:
            entry = ((s.taps - 1 - tap) * s.outs + n[None, :]) * s.channels + k[:, None]
        else:
            entry = (tap * s.channels + k)[:, None] * s.outs + n[None, :]
        b = tl.load(weights + entry, mask=(n < s.outs)[None, :], other=0.0)
        sums = tl.dot(a, b, sums, input_precision="tf32")
    _finish(sums, bias, out, client, m, n, total, s.outs, HAS_BIAS, RELU)


@launchable
def _strided_gradient_kernel(
    grads, kernel, out, batch,
    s: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """out[c, m, n], the gradient of pixels m and channels n for a convolution with stride.

    For pixel m = (b, r, q), with the sum over all outs o, taps (k, l) and positions (i, j) with
    i * down + k - top = r and j * right + l - left = q,

        out[c, m, n] = sum of grads[c, (b, i, j), o] * kernel[c, (k, l, n), o]

    So only every `down`-th row of the kernel contributes to a pixel: those with the remainder of
    r + top modulo `down`; the same holds for columns. Program ((i, remainders), c, j) computes BM
    pixels of block i with these remainders, and BN channels of block j; it reads BK outs at a time.
    """
    client = tl.program_id(1).to(tl.int64)
    n = tl.program_id(2) * BN + tl.arange(0, BN)
    remainder = tl.program_id(0) % (s.down * s.right)
    above, beside = remainder // s.right, remainder % s.right
    m = tl.program_id(0) // (s.down * s.right) * BM + tl.arange(0, BM)
    image, row, column = position_of(m, tl.cdiv(s.tall, s.down), tl.cdiv(s.wide, s.right))
    row = row * s.down + (above + s.top * (s.down - 1)) % s.down
    column = column * s.right + (beside + s.left * (s.right - 1)) % s.right
    inside = (image < batch) & (row < s.tall) & (column < s.wide)
    last, end = (row + s.top - above) // s.down, (column + s.left - beside) // s.right
    grads += client * batch * s.rows * s.columns * s.outs
    weights = kernel + client * s.taps * s.channels * s.outs
    tall_taps = tl.cdiv(s.taps // s.width - above, s.down)
    wide_taps = tl.cdiv(s.width - beside, s.right)
    c = tl.arange(0, BK)
    blocks: tl.constexpr = s.outs // BK
    sums = tl.zeros((BM, BN), tl.float32)
    for step in range(tall_taps * wide_taps * blocks):
        number, k = step // blocks, step % blocks * BK + c
        down_by, right_by = number // wide_taps, number % wide_taps
        r, q = last - down_by, end - right_by
        there = inside & (r >= 0) & (r < s.rows) & (q >= 0) & (q < s.columns)
        start = ((image * s.rows + r) * s.columns + q) * s.outs
        a = tl.load(grads + start[:, None] + k[None, :], mask=there[:, None], other=0.0)
        tap = (above + down_by * s.down) * s.width + beside + right_by * s.right
        entry = (tap * s.channels + n[None, :]) * s.outs + k[:, None]
        b = tl.load(weights + entry, mask=(n < s.channels)[None, :], other=0.0)
        sums = tl.dot(a, b, sums, input_precision="tf32")
    out += client * batch * s.tall * s.wide * s.channels
    entry = ((image * s.tall + row) * s.wide + column)[:, None] * s.channels + n[None, :]
    there = inside[:, None] & (n < s.channels)[None, :]
    tl.store(out + entry, sums.to(out.dtype.element_ty), mask=there)


@triton.jit
def _finish(
    sums, bias, out, client, m, n, total, outs: tl.constexpr, HAS_BIAS: tl.constexpr,
    RELU: tl.constexpr,
):  # fmt: skip
    """out[c, m, n] = sums + bias[c, n], with an optional ReLU."""
    if HAS_BIAS:
        sums += tl.load(bias + client * outs + n, mask=n < outs, other=0.0).to(tl.float32)[None, :]
    if RELU:
        sums = tl.maximum(sums, 0.0, propagate_nan=tl.PropagateNan.ALL)
    entry = (client * total + m)[:, None] * outs + n[None, :]
    there = (m < total)[:, None] & (n < outs)[None, :]
    tl.store(out + entry, sums.to(out.dtype.element_ty), mask=there)


def product(
    images: Tensor, kernel: Tensor, bias: Tensor | None, geometry: Geometry, padding: Padding
) -> Tensor:
    """Convolve images [C * B, H, W, channels] with kernels [C, h * w * channels, out].

    The result is [C * B, H', W', out], with an optional ReLU. Only images that are read by taps may
    have a `padding`; others must be stored with it.
    """
    rows, columns = result_size(images, geometry, padding)
    out = images.new_empty(len(images), rows, columns, kernel.shape[2])
    _product(images, kernel, bias, out, geometry, padding, turned=False)
    return out


def turned_product(
    grads: Tensor, kernel: Tensor, size: tuple[int, int], channels: int, padding: Padding
) -> Tensor:
    """The gradient of the images [C * B, H, W, channels], from `grads` [C * B, H', W', out].

    It is the convolution of the grads with the kernels [C, h * w * channels, out] flipped: taps
    from the last to the first, and channels and outs exchanged.
    """
    rows, columns = result_size(grads, Geometry(size), padding)
    out = grads.new_empty(len(grads), rows, columns, channels)
    _product(grads, kernel, None, out, Geometry(size), padding, turned=True)
    return out


def strided_gradient(
    grads: Tensor, kernel: Tensor, size: tuple[int, int], channels: int, geometry: Geometry,
    padding: Padding,
) -> Tensor:  # fmt: skip
    """`turned_product` for a convolution with stride and images of `size`; grads by taps."""
    out = grads.new_empty(len(grads), *size, channels)
    clients, batch = len(kernel), len(grads) // len(kernel)
    _, rows, columns, outs = grads.shape
    s = sizes_of(out, (rows, columns), outs, geometry, padding)
    wide_tile = min(tile(channels), 128)
    deep = next(size for size in (64, 32, 16) if outs % size == 0)
    pixels = batch * triton.cdiv(s.tall, s.down) * triton.cdiv(s.wide, s.right)
    grid = triton.cdiv(pixels, 64) * s.down * s.right, clients, triton.cdiv(channels, wide_tile)
    _strided_gradient_kernel[grid](
        grads, kernel, out, batch, s, BM=64, BN=wide_tile, BK=deep, num_warps=4, num_stages=3
    )
    return out


def _product(
    images: Tensor, kernel: Tensor, bias: Tensor | None, out: Tensor, geometry: Geometry,
    padding: Padding, *, turned: bool,
) -> None:  # fmt: skip
    clients, batch = len(kernel), len(images) // len(kernel)
    _, rows, columns, outs = out.shape
    s = sizes_of(images, (rows, columns), outs, geometry, padding)
    total, wide_tile = batch * s.rows * s.columns, min(tile(s.outs), 128)
    wide_tiles = triton.cdiv(s.outs, wide_tile)
    programs = clients * triton.cdiv(total, 128) * wide_tiles
    # One program with a wide tile keeps a multiprocessor busy, and saves loads.
    large = programs >= (PROGRAMS if wide_tile <= 64 else PROGRAMS // 2)
    block, warps = 128 if large else 64, 8 if wide_tile > 64 and programs >= PROGRAMS else 4
    grid = triton.cdiv(total, block), clients, wide_tiles
    tensors = images, kernel, kernel if bias is None else bias, out
    follow = {"HAS_BIAS": bias is not None, "RELU": geometry.relu}
    if by_taps(s.channels):
        deep = next(size for size in (64, 32, 16) if s.channels % size == 0)
        _taps_kernel[grid](
            *tensors, batch, s, BORDER=any(padding), **follow, TURNED=turned, BM=block,
            BN=wide_tile, BK=deep, num_warps=warps, num_stages=3 if large else 4,
        )  # fmt: skip
        return
    depth = s.taps * s.channels
    deep = min(tile(depth), 64)
    _product_kernel[grid](
        *tensors, batch, s, **follow, EXACT=depth % deep == 0, TURNED=turned, BM=block,
        BN=wide_tile, BK=deep, num_warps=warps, num_stages=3,
    )  # fmt: skip
