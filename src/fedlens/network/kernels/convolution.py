"""Triton kernels: the convolutions of many clients side by side, with little memory traffic.

Images are [C * B, H, W, channels]. A convolution goes tap by tap, places outside being masked; one
of few channels takes several taps at once, from images that are padded already: row m of a client's
patches starts at one address, and entry k of it lies (k // run) image rows and k % run numbers
further, where a run is the width of the kernel times the channels. Patches stay in registers. So
does what follows a convolution: bias, ReLU, and max-pooling.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedlens.network.kernels.sizes import PROGRAMS, Padding, tile

DEAD = 4  # the winner of a window whose maximum ReLU sets to 0

_DEAD = tl.constexpr(DEAD)


class Geometry(NamedTuple):
    """Of a convolution: the kernel's size, the stride, and what follows in the same breath."""

    size: tuple[int, int]
    stride: tuple[int, int] = (1, 1)
    relu: bool = False
    pool: bool = False  # 2 x 2


PLAIN = Geometry((1, 1))
NONE: Padding = (0, 0, 0, 0)


@triton.jit
def place_of(m, rows, columns):
    """Image, row and column of place m."""
    image, place = m // (rows * columns), m % (rows * columns)
    return image, place // columns, place % columns


@triton.jit
def _product_kernel(
    images, kernel, bias, out,
    batch, rows: tl.constexpr, columns: tl.constexpr, tall: tl.constexpr, wide: tl.constexpr,
    channels: tl.constexpr, run: tl.constexpr, depth: tl.constexpr, outs: tl.constexpr,
    down: tl.constexpr, right: tl.constexpr, HAS_BIAS: tl.constexpr, RELU: tl.constexpr,
    EXACT: tl.constexpr, TURNED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    client = tl.program_id(1).to(tl.int64)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(2) * BN + tl.arange(0, BN)
    total = batch * rows * columns
    inside = (m < total)[:, None]
    image, row, column = place_of(m, rows, columns)
    start = images + client * batch * tall * wide * channels
    start += ((image * tall + row * down) * wide + column * right) * channels
    weights = kernel + client * depth * outs
    sums = tl.zeros((BM, BN), tl.float32)
    for first in range(0, depth, BK):
        k = first + tl.arange(0, BK)
        shift = (k // run) * wide * channels + k % run
        if TURNED:  # the kernel of the other direction: its taps from the last to the first
            tap = depth // channels - 1 - k // channels
            entry = (tap * outs)[:, None] + n[None, :]
            entry = entry * channels + (k % channels)[:, None]
        else:
            entry = k[:, None] * outs + n[None, :]
        if EXACT:  # blocks fit the depth: one mask less
            a = tl.load(start[:, None] + shift[None, :], mask=inside, other=0.0)
            b = tl.load(weights + entry, mask=(n < outs)[None, :], other=0.0)
        else:
            there = inside & (k < depth)[None, :]
            a = tl.load(start[:, None] + shift[None, :], mask=there, other=0.0)
            b = tl.load(weights + entry, mask=(k < depth)[:, None] & (n < outs)[None, :], other=0.0)
        sums = tl.dot(a, b, sums, input_precision="tf32")
    _finish(sums, bias, out, client, m, n, total, outs, HAS_BIAS, RELU)


@triton.jit
def _taps_kernel(
    images, kernel, bias, out,
    batch, rows: tl.constexpr, columns: tl.constexpr, tall: tl.constexpr, wide: tl.constexpr,
    channels: tl.constexpr, width: tl.constexpr, taps: tl.constexpr, outs: tl.constexpr,
    down: tl.constexpr, right: tl.constexpr, top: tl.constexpr, left: tl.constexpr,
    BORDER: tl.constexpr, HAS_BIAS: tl.constexpr, RELU: tl.constexpr, TURNED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Blocks of channels, which BK divides, tap after tap."""
    client = tl.program_id(1).to(tl.int64)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(2) * BN + tl.arange(0, BN)
    total = batch * rows * columns
    image, row, column = place_of(m, rows, columns)
    row, column = row * down - top, column * right - left
    images += client * batch * tall * wide * channels
    start = ((image * tall + row) * wide + column) * channels
    weights = kernel + client * taps * channels * outs
    c = tl.arange(0, BK)
    blocks: tl.constexpr = channels // BK
    sums = tl.zeros((BM, BN), tl.float32)
    for step in range(taps * blocks):
        tap, first = step // blocks, step % blocks * BK
        down_by, right_by = tap // width, tap % width
        inside = m < total
        if BORDER:
            r, q = row + down_by, column + right_by
            inside &= (r >= 0) & (r < tall) & (q >= 0) & (q < wide)
        shift = (down_by * wide + right_by) * channels + first
        a = tl.load(images + (start + shift)[:, None] + c[None, :], mask=inside[:, None], other=0.0)
        k = first + c
        if TURNED:  # the kernel of the other direction: its taps from the last to the first
            entry = ((taps - 1 - tap) * outs + n[None, :]) * channels + k[:, None]
        else:
            entry = (tap * channels + k)[:, None] * outs + n[None, :]
        b = tl.load(weights + entry, mask=(n < outs)[None, :], other=0.0)
        sums = tl.dot(a, b, sums, input_precision="tf32")
    _finish(sums, bias, out, client, m, n, total, outs, HAS_BIAS, RELU)


@triton.jit
def _finish(
    sums, bias, out, client, m, n, total, outs: tl.constexpr, HAS_BIAS: tl.constexpr,
    RELU: tl.constexpr,
):  # fmt: skip
    """Bias and ReLU of the sums at places m, put down."""
    if HAS_BIAS:
        sums += tl.load(bias + client * outs + n, mask=n < outs, other=0.0).to(tl.float32)[None, :]
    if RELU:
        sums = tl.maximum(sums, 0.0, propagate_nan=tl.PropagateNan.ALL)
    place = (client * total + m)[:, None] * outs + n[None, :]
    there = (m < total)[:, None] & (n < outs)[None, :]
    tl.store(out + place, sums.to(out.dtype.element_ty), mask=there)


@triton.jit
def _pooled_kernel(
    images, kernel, bias, out, winners,
    batch, rows: tl.constexpr, columns: tl.constexpr, tall: tl.constexpr, wide: tl.constexpr,
    channels: tl.constexpr, width: tl.constexpr, taps: tl.constexpr, outs: tl.constexpr,
    down: tl.constexpr, right: tl.constexpr, top: tl.constexpr, left: tl.constexpr,
    TAPS: tl.constexpr, BORDER: tl.constexpr, HAS_BIAS: tl.constexpr, RELU: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Both products, and the maximum of windows of 2 x 2: a row of sums for each corner."""
    client = tl.program_id(1).to(tl.int64)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(2) * BN + tl.arange(0, BN)
    total = batch * rows * columns
    inside = m < total
    image, row, column = place_of(m, rows, columns)
    row, column = row * (2 * down) - top, column * (2 * right) - left
    images += client * batch * tall * wide * channels
    start = ((image * tall + row) * wide + column) * channels
    depth: tl.constexpr = taps * channels
    weights = kernel + client * depth * outs
    c = tl.arange(0, BK)
    a = tl.zeros((BM, BN), tl.float32)
    b = tl.zeros((BM, BN), tl.float32)
    d = tl.zeros((BM, BN), tl.float32)
    e = tl.zeros((BM, BN), tl.float32)
    below: tl.constexpr = down * wide * channels
    beside: tl.constexpr = right * channels
    for step in range(tl.cdiv(depth, BK)):
        k = step * BK + c
        w = tl.load(
            weights + k[:, None] * outs + n[None, :],
            mask=(k < depth)[:, None] & (n < outs)[None, :], other=0.0,
        )  # fmt: skip
        if TAPS:
            blocks: tl.constexpr = channels // BK
            tap = step // blocks
            shift = (tap // width * wide + tap % width) * channels + step % blocks * BK
            p = images + (start + shift)[:, None] + c[None, :]
            upper = inside
            lower = inside
            if BORDER:
                r = row + tap // width
                upper = inside & (r >= 0) & (r < tall)
                lower = inside & (r + down >= 0) & (r + down < tall)
            at_a = upper
            at_b = upper
            at_d = lower
            at_e = lower
            if BORDER:
                q = column + tap % width
                first = (q >= 0) & (q < wide)
                second = (q + right >= 0) & (q + right < wide)
                at_a = upper & first
                at_b = upper & second
                at_d = lower & first
                at_e = lower & second
            a = tl.dot(tl.load(p, mask=at_a[:, None], other=0.0), w, a, input_precision="tf32")
            x = tl.load(p + beside, mask=at_b[:, None], other=0.0)
            b = tl.dot(x, w, b, input_precision="tf32")
            x = tl.load(p + below, mask=at_d[:, None], other=0.0)
            d = tl.dot(x, w, d, input_precision="tf32")
            x = tl.load(p + below + beside, mask=at_e[:, None], other=0.0)
            e = tl.dot(x, w, e, input_precision="tf32")
        else:
            run: tl.constexpr = width * channels
            p = images + start[:, None] + ((k // run) * wide * channels + k % run)[None, :]
            there = inside[:, None] & (k < depth)[None, :]
            a = tl.dot(tl.load(p, mask=there, other=0.0), w, a, input_precision="tf32")
            x = tl.load(p + beside, mask=there, other=0.0)
            b = tl.dot(x, w, b, input_precision="tf32")
            x = tl.load(p + below, mask=there, other=0.0)
            d = tl.dot(x, w, d, input_precision="tf32")
            x = tl.load(p + below + beside, mask=there, other=0.0)
            e = tl.dot(x, w, e, input_precision="tf32")
    upper_best, lower_best = tl.maximum(a, b), tl.maximum(d, e)
    best = tl.maximum(upper_best, lower_best)
    corner = tl.where(
        upper_best >= lower_best, tl.where(a >= b, 0, 1), tl.where(d >= e, 2, 3)
    )  # the first, if several are greatest
    if HAS_BIAS:
        best += tl.load(bias + client * outs + n, mask=n < outs, other=0.0).to(tl.float32)[None, :]
    if RELU:
        corner = tl.where(best > 0, corner, _DEAD)
        best = tl.maximum(best, 0.0, propagate_nan=tl.PropagateNan.ALL)
    place = (client * total + m)[:, None] * outs + n[None, :]
    there = inside[:, None] & (n < outs)[None, :]
    tl.store(winners + place, corner.to(tl.uint8), mask=there)
    tl.store(out + place, best.to(out.dtype.element_ty), mask=there)


@triton.jit
def _spread_kernel(
    slopes, winners, out,
    count, rows: tl.constexpr, columns: tl.constexpr, outs: tl.constexpr,
    slope_rows: tl.constexpr, slope_columns: tl.constexpr, tall: tl.constexpr, wide: tl.constexpr,
    top: tl.constexpr, left: tl.constexpr, room: tl.constexpr,
    KIND: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Place m of `out` [count, tall, wide, room]: its slope, or 0 on the border and for losers."""
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    image, place = m // (tall * wide), m % (tall * wide)
    row, column = place // wide - top, place % wide - left
    inside = (m < count * tall * wide) & (row >= 0) & (column >= 0)
    here = (n < outs)[None, :]
    if KIND == "pool":
        inside &= (row < 2 * slope_rows) & (column < 2 * slope_columns)
        there = inside[:, None] & here
        window = ((image * slope_rows + row // 2) * slope_columns + column // 2).to(tl.int64)
        slope = tl.load(slopes + window[:, None] * outs + n[None, :], mask=there, other=0.0)
        winner = tl.load(winners + window[:, None] * outs + n[None, :], mask=there, other=9)
        corner = (row % 2 * 2 + column % 2).to(tl.uint8)
        slope = tl.where(winner == corner[:, None], slope, 0.0)
    else:
        inside &= (row < rows) & (column < columns)
        there = inside[:, None] & here
        source = ((image * rows + row) * columns + column).to(tl.int64)[:, None] * outs + n[None, :]
        slope = tl.load(slopes + source, mask=there, other=0.0)
        if KIND == "relu":
            result = tl.load(winners + source, mask=there, other=0.0)
            slope = tl.where(result > 0, slope, 0.0)
    store = (m < count * tall * wide)[:, None] & (n < room)[None, :]
    tl.store(out + m.to(tl.int64)[:, None] * room + n[None, :], slope, mask=store)


def product(
    images: Tensor, kernel: Tensor, bias: Tensor | None, geometry: Geometry, padding: Padding
) -> tuple[Tensor, Tensor | None]:
    """Patches of images [C * B, H, W, channels] times kernels [C, h * w * channels, out].

    The result is [C * B, H', W', out]; with pooling there is, besides, the winner of each window.
    Only with many channels (`by_taps`) there may be a padding.
    """
    rows, columns = places(images, geometry, padding)
    if not geometry.pool:
        out = images.new_empty(len(images), rows, columns, kernel.shape[2])
        _product(images, kernel, bias, out, geometry, padding, turned=False)
        return out, None
    rows, columns = rows // 2, columns // 2
    out = images.new_empty(len(images), rows, columns, kernel.shape[2])
    winners = torch.empty_like(out, dtype=torch.uint8)
    count, tall, wide, channels = images.shape
    clients, outs, (height, width) = len(kernel), kernel.shape[2], geometry.size
    total, (left, _, top, _) = count // clients * rows * columns, padding
    wide_tile, taps = min(tile(outs), 64), by_taps(channels)
    deep = 32 if channels % 32 == 0 else 16 if taps else min(tile(height * width * channels), 128)
    _pooled_kernel[(triton.cdiv(total, 64), clients, triton.cdiv(outs, wide_tile))](
        images, kernel, kernel if bias is None else bias, out, winners, count // clients, rows,
        columns, tall, wide, channels, width, height * width, outs, *geometry.stride, top, left,
        TAPS=taps, BORDER=any(padding), HAS_BIAS=bias is not None, RELU=geometry.relu, BM=64,
        BN=wide_tile, BK=deep, num_warps=4, num_stages=3,
    )  # fmt: skip
    return out, winners


def turned_product(
    slopes: Tensor, kernel: Tensor, size: tuple[int, int], channels: int, padding: Padding
) -> Tensor:
    """Slopes times the same kernels turned around: the images' gradient."""
    rows, columns = places(slopes, Geometry(size), padding)
    out = slopes.new_empty(len(slopes), rows, columns, channels)
    _product(slopes, kernel, None, out, Geometry(size), padding, turned=True)
    return out


def _product(
    images: Tensor, kernel: Tensor, bias: Tensor | None, out: Tensor, geometry: Geometry,
    padding: Padding, *, turned: bool,
) -> None:  # fmt: skip
    count, tall, wide, channels = images.shape
    _, rows, columns, outs = out.shape
    clients, (height, width) = len(kernel), geometry.size
    total, wide_tile = count // clients * rows * columns, min(tile(outs), 128)
    many = clients * triton.cdiv(total, 128) >= PROGRAMS
    block, warps = 128 if many else 64, 4 if wide_tile <= 64 else 8
    grid = triton.cdiv(total, block), clients, triton.cdiv(outs, wide_tile)
    tensors = images, kernel, kernel if bias is None else bias, out
    shape = count // clients, rows, columns, tall, wide, channels
    follow = {"HAS_BIAS": bias is not None, "RELU": geometry.relu}
    if by_taps(channels):
        left, _, top, _ = padding
        deep = next(size for size in (64, 32, 16) if channels % size == 0)
        _taps_kernel[grid](
            *tensors, *shape, width, height * width, outs, *geometry.stride, top, left,
            BORDER=any(padding), **follow, TURNED=turned, BM=block, BN=wide_tile, BK=deep,
            num_warps=warps, num_stages=3 if many else 4,
        )  # fmt: skip
        return
    depth = height * width * channels
    deep = min(tile(depth), 64)
    _product_kernel[grid](
        *tensors, *shape, width * channels, depth, outs, *geometry.stride, **follow,
        EXACT=depth % deep == 0, TURNED=turned, BM=block, BN=wide_tile, BK=deep,
        num_warps=warps, num_stages=3,
    )  # fmt: skip


def by_taps(channels: int) -> bool:
    """Whether images of so many channels are read tap by tap, and need no border."""
    return channels % 16 == 0


def spare_channels(size: tuple[int, int], channels: int) -> int:
    """How many channels of zeros make loads wider where they cost no larger tile."""
    more, taps = -channels % 4, size[0] * size[1]
    worth = 1 < channels < 16 and tile(taps * (channels + more)) == tile(taps * channels)
    return more if worth else 0


def places(images: Tensor, geometry: Geometry, padding: Padding = NONE) -> tuple[int, int]:
    """Rows and columns of what a convolution gives, before pooling."""
    left, right, top, bottom = padding
    _, tall, wide, _ = images.shape
    sides = zip(
        (tall + top + bottom, wide + left + right), geometry.size, geometry.stride, strict=True
    )
    rows, columns = ((side - size) // step + 1 for side, size, step in sides)
    return rows, columns


def spread(
    slopes: Tensor,
    kept: Tensor | None,
    shape: tuple[int, int],
    padding: Padding,
    geometry: Geometry,
    room: int = 0,
) -> Tensor:
    """Slopes [N, ...] taken back through pooling and ReLU to [N, *shape], within a zero border.

    `kept` is what the forward pass left: the winners, or else (for ReLU) the result itself. With
    `room` there are so many channels, the last of them zero.
    """
    count, slope_rows, slope_columns, outs = slopes.shape
    left, right, top, bottom = padding
    tall, wide = shape[0] + top + bottom, shape[1] + left + right
    room = max(room, outs)
    out = slopes.new_empty(count, tall, wide, room)
    kind = "pool" if geometry.pool else "relu" if geometry.relu else "plain"
    wide_tile = min(int(triton.next_power_of_2(room)), 128)
    block = 4096 // max(wide_tile, 8)
    _spread_kernel[(triton.cdiv(count * tall * wide, block), triton.cdiv(room, wide_tile))](
        slopes, slopes if kept is None else kept, out, count, *shape, outs, slope_rows,
        slope_columns, tall, wide, top, left, room, KIND=kind, BM=block, BN=wide_tile,
    )  # fmt: skip
    return out
