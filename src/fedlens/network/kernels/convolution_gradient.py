"""Triton kernels for the gradients of convolution kernels and biases of C clients.

    dw[c, k, n] = sum over positions m of patch[c, m, k] * grads[c, m, n]
    db[c, n] = sum over positions m of grads[c, m, n]

with the patches and positions of `convolution.py`. Small gradients have long sums: these are split,
so that there are enough programs to keep a GPU busy, into parts

    [splits, C, depth, out] and [shares, C, out]

that one more kernel adds up. Of the programs that read the same grads, the first also sums its part
of db, so that shares = splits. Only with pooling, where there are fewer grads than positions, each
of these programs reads a separate share of the grads once more for db.

If nothing else needs the grads before ReLU and pooling, as in a first layer, they are never stored:
with KIND "relu" or "pool" a program computes them from the grads of the result and from the tensor
that the forward pass kept.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedlens.network.kernels.borders import grads_before, scaled
from fedlens.network.kernels.convolution import position_of
from fedlens.network.kernels.launch import launchable
from fedlens.network.kernels.pooled import DEAD
from fedlens.network.kernels.sizes import (
    PROGRAMS,
    SHARED_MEMORY,
    Frame,
    Geometry,
    by_taps,
    result_size,
    sizes_of,
    tile,
)
from fedlens.network.pool import Windows
from fedlens.network.stacked.products import Padding

_DEAD = tl.constexpr(DEAD)


@launchable
def _gradient_kernel(
    images, grads, kept, weights, biases, clients, batch, splits,
    s: tl.constexpr, frame: tl.constexpr, KIND: tl.constexpr, windows: tl.constexpr,
    SCALE: tl.constexpr, HAS_BIAS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """weights[split, c, k, n], parts of dw with patches read by runs, and biases[share, c, n].

    Program (i, c, (split, j)) computes BK entries k of block i and BN outs n of block j, over the
    positions of a split, BM at a time.
    """
    client = tl.program_id(1).to(tl.int64)
    tiles = tl.cdiv(s.outs, BN)
    split = tl.program_id(2) // tiles
    k = tl.program_id(0) * BK + tl.arange(0, BK)
    n = tl.program_id(2) % tiles * BN + tl.arange(0, BN)
    run: tl.constexpr = s.width * s.channels
    depth: tl.constexpr = s.taps * s.channels
    total = batch * s.rows * s.columns
    start = images + client * batch * s.tall * s.wide * s.channels
    grads += client * batch * frame.tall * frame.wide * s.outs
    kept += client * batch * frame.tall * frame.wide * s.outs
    shift = (k // run) * s.wide * s.channels + k % run
    in_loop: tl.constexpr = HAS_BIAS and KIND != "pool"
    sums = tl.zeros((BK, BN), tl.float32)
    bias = tl.zeros((BM, BN), tl.float32)
    chunks = tl.cdiv(total, BM * splits)
    for chunk in range(chunks):
        m = (split * chunks + chunk) * BM + tl.arange(0, BM)
        image, row, column = position_of(m, s.rows, s.columns)
        begin = start + ((image * s.tall + row * s.down) * s.wide + column * s.right) * s.channels
        inside = (m < total)[:, None]
        a = tl.load(begin[:, None] + shift[None, :], mask=inside & (k < depth)[None, :], other=0.0)
        if KIND == "plain":
            entry = (image * frame.tall + row + frame.top) * frame.wide + column + frame.left
            there = inside & (n < s.outs)[None, :]
            d = tl.load(grads + (entry * s.outs)[:, None] + n[None, :], mask=there, other=0.0)
        else:
            d = grads_before(
                grads, kept, image, row, column, n, m < total,
                frame.tall, frame.wide, s.outs, KIND, windows, SCALE,
            )  # fmt: skip
        sums = tl.dot(tl.trans(a), d, sums, input_precision="tf32")
        if in_loop & (tl.program_id(0) == 0):
            bias += d
    part = split * clients + client
    there = (k < depth)[:, None] & (n < s.outs)[None, :]
    tl.store(weights + (part * depth + k[:, None]) * s.outs + n[None, :], sums, mask=there)
    if in_loop & (tl.program_id(0) == 0):
        tl.store(biases + part * s.outs + n, tl.sum(bias, 0), mask=n < s.outs)
    if HAS_BIAS and KIND == "pool":
        share = split * tl.num_programs(0) + tl.program_id(0)
        shares, cells = splits * tl.num_programs(0), batch * frame.tall * frame.wide
        bias = _bias_of_windows(grads, kept, cells, share, shares, n, s.outs, SCALE, BM, BN)
        tl.store(biases + (share * clients + client) * s.outs + n, bias, mask=n < s.outs)


@launchable
def _shifted_gradient_kernel(
    images, grads, weights, biases, clients, batch, splits,
    s: tl.constexpr, frame: tl.constexpr, MASKED: tl.constexpr, TURNED: tl.constexpr,
    HAS_BIAS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """The same by taps, without stride: pixels p times the grads at p - tap.

    With the row and column of a tap counted from (top, left), and the sum over a split's pixels p,

        weights[split, c, (tap, k), n] = sum of images[c, p, k] * grads[c, p - tap, n]

    Program ((i, tap), c, (split, j)) computes BK channels k of block i at one tap, and otherwise
    the same as in `_gradient_kernel`. Grads have a border of zeros, so that p - tap always exists;
    or, with MASKED, no border, and positions outside are masked. TURNED: the product is computed as
    its transpose, whose rows are the outs; matrix units take 64 rows at a time. The program of
    block 0 whose tap is (0, 0) reads every grad, and computes the biases.
    """
    client = tl.program_id(1).to(tl.int64)
    tiles = tl.cdiv(s.outs, BN)
    split = tl.program_id(2) // tiles
    tap = tl.program_id(0) % s.taps
    k = tl.program_id(0) // s.taps * BK + tl.arange(0, BK)
    n = tl.program_id(2) % tiles * BN + tl.arange(0, BN)
    total = batch * s.tall * s.wide
    images += client * total * s.channels
    grads += client * batch * frame.tall * frame.wide * s.outs
    up, back = tap // s.width - s.top, tap % s.width - s.left
    shifted = grads + ((frame.top - up) * frame.wide + frame.left - back) * s.outs
    first: tl.constexpr = s.top * s.width + s.left
    sums = tl.zeros((BN, BK) if TURNED else (BK, BN), tl.float32)
    bias = tl.zeros((BM, BN), tl.float32)
    chunks = tl.cdiv(total, BM * splits)
    for chunk in range(chunks):
        m = (split * chunks + chunk) * BM + tl.arange(0, BM)
        image, row, column = position_of(m, s.tall, s.wide)
        inside = (m < total)[:, None]
        there = inside & (k < s.channels)[None, :]
        a = tl.load(images + m[:, None] * s.channels + k[None, :], mask=there, other=0.0)
        entry = ((image * frame.tall + row) * frame.wide + column) * s.outs
        if MASKED:
            r, q = row - up, column - back
            inside &= ((r >= 0) & (r < s.rows) & (q >= 0) & (q < s.columns))[:, None]
        there = inside & (n < s.outs)[None, :]
        d = tl.load(shifted + entry[:, None] + n[None, :], mask=there, other=0.0)
        if TURNED:
            sums = tl.dot(tl.trans(d), a, sums, input_precision="tf32")
        else:
            sums = tl.dot(tl.trans(a), d, sums, input_precision="tf32")
        if HAS_BIAS & (tl.program_id(0) == first):
            bias += d
    if TURNED:
        sums = tl.trans(sums)
    part, depth = split * clients + client, s.taps * s.channels
    there = (k < s.channels)[:, None] & (n < s.outs)[None, :]
    entry = (part * depth + tap * s.channels + k)[:, None] * s.outs + n[None, :]
    tl.store(weights + entry, sums, mask=there)
    if HAS_BIAS & (tl.program_id(0) == first):
        tl.store(biases + part * s.outs + n, tl.sum(bias, 0), mask=n < s.outs)


@triton.jit
def _bias_of_windows(
    grads, kept, cells, share, shares, n,
    outs: tl.constexpr, SCALE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """A share of db[c, n] with pooling: sum of SCALE * grads over windows that have a winner.

    Share `share` is every `shares`-th block of the client's windows.
    """
    sums = tl.zeros((BM, BN), tl.float32)
    for chunk in range(share, tl.cdiv(cells, BM), shares):
        m = chunk * BM + tl.arange(0, BM)
        there = (m < cells)[:, None] & (n < outs)[None, :]
        entry = m[:, None] * outs + n[None, :]
        grad = tl.load(grads + entry, mask=there, other=0.0)
        winner = tl.load(kept + entry, mask=there, other=_DEAD)
        sums += tl.where(winner < _DEAD, scaled(grad, SCALE), 0.0)
    return tl.sum(sums, 0)


@launchable(do_not_specialize=["count", "size", "bias_count", "bias_size"])
def _gather_kernel(
    parts, sums, count, size, bias_parts, bias_sums, bias_count, bias_size,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """sums[i] = sum over `count` parts of parts[part, i], and the same for biases.

    The last programs sum BLOCK biases each, the others BLOCK weights, in the order of memory.
    """
    blocks = tl.cdiv(size, BLOCK)
    block = tl.program_id(0)
    if block >= blocks:
        block -= blocks
        parts, sums, count, size = bias_parts, bias_sums, bias_count, bias_size
    i = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for first in range(0, count, ROWS):
        part = first + tl.arange(0, ROWS)
        there = (part < count)[:, None] & (i < size)[None, :]
        entry = part.to(tl.int64)[:, None] * size + i[None, :]
        total += tl.load(parts + entry, mask=there, other=0.0)
    tl.store(sums + i, tl.sum(total, 0), mask=i < size)


def kernel_gradient(
    images: Tensor, grads: Tensor, border: tuple[int, int], clients: int, geometry: Geometry,
    has_bias: bool, kept: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """dw [C, h * w * channels, out] and db [C, out], float32, of images stored with padding.

    `grads` [C * B, H', W', out] may have a border of rows and columns. If `kept`, the tensor that
    the forward pass kept, is given, they are those after ReLU and pooling, without a border.
    """
    _, tall, wide, outs = grads.shape
    s = sizes_of(images, result_size(images, geometry), outs, geometry)
    batch, depth = len(images) // clients, s.taps * s.channels
    kind, wide_tile = "plain" if kept is None else geometry.epilogue, min(tile(outs), 128)
    block, positions, warps, stages = _tiles(depth, kind, wide_tile, images.element_size())
    tiles, wide_tiles = triton.cdiv(depth, block), triton.cdiv(outs, wide_tile)
    programs = clients * tiles * wide_tiles
    splits = _splits(programs, batch * s.rows * s.columns, 2 * PROGRAMS)
    weights = torch.empty(splits, clients, depth, outs, device=images.device)
    biases = torch.empty(
        splits * (tiles if kind == "pool" else 1), clients, outs, device=images.device
    )
    _gradient_kernel[(tiles, clients, splits * wide_tiles)](
        images, grads, grads if kept is None else kept, weights, biases, clients, batch, splits, s,
        Frame(tall, wide, *border), KIND=kind,
        windows=geometry.pool or Windows(), SCALE=geometry.drops.scale, HAS_BIAS=has_bias,
        BM=positions, BN=wide_tile, BK=block, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return _gathered(weights, biases if has_bias else None)


def _tiles(depth: int, kind: str, wide_tile: int, bytes: int) -> tuple[int, int, int, int]:
    """Entries, positions at a time, warps and stages of a program of `_gradient_kernel`.

    With few channels loads are narrow, and with "pool" grads are computed from winners: according
    to measurements, more stages do not hide this.
    """
    if depth >= 128:
        of_grads = wide_tile if kind == "plain" else 2 * wide_tile
        return 64, 64, 4, _stages(64 + of_grads, bytes, most=3)
    block = tile(depth)
    stages = {"plain": 2, "relu": 3, "pool": 1}[kind]
    return block, 64, 4 if block * wide_tile <= 8192 else 8, stages


def shifted_gradient(
    images: Tensor, grads: Tensor, border: tuple[int, int], clients: int, geometry: Geometry,
    padding: Padding, has_bias: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """`kernel_gradient` for images that are stored without padding.

    Grads have the widest possible border, or none.
    """
    _, tall, wide, outs = grads.shape
    s = sizes_of(images, result_size(images, geometry, padding), outs, geometry, padding)
    batch = len(images) // clients
    block, wide_tile = min(tile(s.channels), 128), min(tile(outs), 128)
    tiles, wide_tiles = triton.cdiv(s.channels, block), triton.cdiv(outs, wide_tile)
    # With large tiles, fewer programs keep a GPU busy, and adding up their parts costs more.
    large = block * wide_tile > 64 * 64
    enough = PROGRAMS // 2 if large else 3 * PROGRAMS // 2
    programs = clients * s.taps * tiles * wide_tiles
    splits = _splits(programs, batch * s.tall * s.wide, enough)
    weights = torch.empty(splits, clients, s.taps * s.channels, outs, device=images.device)
    biases = torch.empty(splits, clients, outs, device=images.device)
    _shifted_gradient_kernel[(s.taps * tiles, clients, splits * wide_tiles)](
        images, grads, weights, biases, clients, batch, splits, s, Frame(tall, wide, *border),
        MASKED=(tall, wide) == (s.rows, s.columns),
        TURNED=block < 64 <= wide_tile, HAS_BIAS=has_bias, BM=64, BN=wide_tile, BK=block,
        num_warps=4, num_stages=_stages(block + wide_tile, images.element_size(), most=4),
    )  # fmt: skip
    return _gathered(weights, biases if has_bias else None)


def _stages(numbers: int, bytes: int, most: int) -> int:
    """How many loads of 64 positions with this many numbers each fit into shared memory."""
    return max(1, min(SHARED_MEMORY // (64 * numbers * bytes), most))


def _splits(programs: int, total: int, enough: int) -> int:
    """The number of parts of a sum over `total` positions, so that there are `enough` programs."""
    return max(1, min(enough // programs, -(-total // 256)))


def _gathered(weights: Tensor, biases: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The sums over parts of dw [splits, C, depth, out], and of db [shares, C, out] if any."""
    if biases is None:
        return weights[0] if len(weights) == 1 else weights.sum(0), None
    if len(biases) == 1:  # then there is one part of weights, too
        return weights[0], biases[0]
    dw = weights[0] if len(weights) == 1 else torch.empty_like(weights[0])
    db = torch.empty_like(biases[0])
    num_weights = 0 if len(weights) == 1 else dw.numel()
    programs = triton.cdiv(num_weights, 256) + triton.cdiv(db.numel(), 256)
    _gather_kernel[(programs,)](
        weights, dw, len(weights), num_weights, biases, db, len(biases), db.numel(),
        ROWS=min(int(triton.next_power_of_2(len(biases))), 16), BLOCK=256,
    )  # fmt: skip
    return dw, db


def by_shifts(channels: int, geometry: Geometry, padding: Padding) -> bool:
    """Whether `shifted_gradient` is correct here and faster than `kernel_gradient`.

    It reads every pixel. Without padding it is slower: there are fewer positions than pixels, and
    `kernel_gradient` needs no padded copy of the images.
    """
    (height, width), (left, right, top, bottom) = geometry.size, padding
    holds = geometry.stride == (1, 1) and left + right < width and top + bottom < height
    return holds and by_taps(channels) and any(padding)
