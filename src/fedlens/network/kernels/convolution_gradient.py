"""Triton kernels of the gradients of convolution kernels and biases of C clients.

    dw[c, k, n] = sum over positions m of patch[c, m, k] * grads[c, m, n]
    db[c, n] = sum over positions m of grads[c, m, n]

with patches and positions as `convolution.py` has them. The sum is long where the gradient is
small: it is split, so that there are programs enough to keep a GPU busy, into parts

    [splits, C, depth + tiles, out]

whose first `depth` rows are a part of dw, and whose last rows are parts of db, one from each of the
`tiles` programs along the depth, if there is a bias. One more kernel adds the parts up.

Where nothing else asks for the grads before ReLU and pooling, as in a first layer, they are never
stored: with KIND "relu" or "pool" a program makes its own of the grads behind them and of what the
forward pass kept.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedlens.network.kernels.borders import grads_before
from fedlens.network.kernels.convolution import DEAD, position_of
from fedlens.network.kernels.launch import launchable
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
    images, grads, kept, out, clients, batch, splits,
    s: tl.constexpr, frame: tl.constexpr, KIND: tl.constexpr, windows: tl.constexpr,
    HAS_BIAS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """out[split, c, k, n], with patches read by runs.

    Program (i, c, (split, j)) has BK entries k of block i, BN outs n of block j, and the positions
    of a split, BM at a time.
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
    sums = tl.zeros((BK, BN), tl.float32)
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
                frame.tall, frame.wide, s.outs, KIND, windows,
            )  # fmt: skip
        sums = tl.dot(tl.trans(a), d, sums, input_precision="tf32")
    out += (split * clients + client) * (depth + HAS_BIAS * tl.num_programs(0)) * s.outs
    there = (k < depth)[:, None] & (n < s.outs)[None, :]
    tl.store(out + k[:, None] * s.outs + n[None, :], sums, mask=there)
    if HAS_BIAS:
        cells = batch * frame.tall * frame.wide
        bias = _bias_part(grads, kept, cells, split, splits, n, s.outs, KIND, BM, BN)
        tl.store(out + (depth + tl.program_id(0)) * s.outs + n, bias, mask=n < s.outs)


@launchable
def _shifted_gradient_kernel(
    images, grads, out, clients, batch, splits,
    s: tl.constexpr, frame: tl.constexpr, MASKED: tl.constexpr, TURNED: tl.constexpr,
    HAS_BIAS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """The same by taps, without stride: pixels p times the grads at p - tap.

    Program ((i, tap), c, (split, j)) has BK channels of block i at one tap, and otherwise what
    `_gradient_kernel` has. Grads lie within a border of zeros, so that p - tap is always there, or
    without one, and what lies outside is masked. TURNED: the product is computed as its transpose,
    whose rows are the outs; matrix units take 64 rows at a time.
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
    sums = tl.zeros((BN, BK) if TURNED else (BK, BN), tl.float32)
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
    if TURNED:
        sums = tl.trans(sums)
    depth: tl.constexpr = s.taps * s.channels
    out += (split * clients + client) * (depth + HAS_BIAS * tl.num_programs(0)) * s.outs
    there = (k < s.channels)[:, None] & (n < s.outs)[None, :]
    tl.store(out + (tap * s.channels + k)[:, None] * s.outs + n[None, :], sums, mask=there)
    if HAS_BIAS:
        cells = batch * frame.tall * frame.wide
        bias = _bias_part(grads, grads, cells, split, splits, n, s.outs, "plain", BM, BN)
        tl.store(out + (depth + tl.program_id(0)) * s.outs + n, bias, mask=n < s.outs)


@triton.jit
def _bias_part(
    grads, kept, cells, split, splits, n,
    outs: tl.constexpr, KIND: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """This program's part of db[c, n]: every (programs * splits)-th block of the client's grads."""
    sums = tl.zeros((BM, BN), tl.float32)
    first = tl.program_id(0) * splits + split
    for chunk in range(first, tl.cdiv(cells, BM), tl.num_programs(0) * splits):
        m = chunk * BM + tl.arange(0, BM)
        there = (m < cells)[:, None] & (n < outs)[None, :]
        entry = m[:, None] * outs + n[None, :]
        grad = tl.load(grads + entry, mask=there, other=0.0)
        if KIND == "pool":
            grad = tl.where(tl.load(kept + entry, mask=there, other=_DEAD) < _DEAD, grad, 0.0)
        if KIND == "relu":
            grad = tl.where(tl.load(kept + entry, mask=there, other=0.0) > 0, grad, 0.0)
        sums += grad
    return tl.sum(sums, 0)


@launchable
def _gather_kernel(
    parts, weights, biases, clients, splits,
    depth: tl.constexpr, outs: tl.constexpr, tiles: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """weights[c, k, n] and biases[c, n]: the sums of their parts.

    Program (i, c) has BLOCK weights of a client, in the order of memory; the last i, its biases.
    """
    each = (depth + tiles) * outs
    client = tl.program_id(1).to(tl.int64)
    if tl.program_id(0) < tl.num_programs(0) - 1:
        i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        s = tl.arange(0, SPLITS)
        sums = tl.zeros((SPLITS, BLOCK), tl.float32)
        for first in range(0, splits, SPLITS):
            split = first + s
            there = (split < splits)[:, None] & (i < depth * outs)[None, :]
            start = (split * clients + client) * each
            sums += tl.load(parts + start[:, None] + i[None, :], mask=there, other=0.0)
        tl.store(weights + client * depth * outs + i, tl.sum(sums, 0), mask=i < depth * outs)
    else:
        for column in range(0, outs, BLOCK):
            n = column + tl.arange(0, BLOCK)
            total = tl.zeros((16, BLOCK), tl.float32)
            for number in range(0, splits * tiles, 16):
                which = number + tl.arange(0, 16)
                part, row = which // tiles, depth + which % tiles
                start = (part * clients + client) * each + row * outs
                filled = (part < splits)[:, None] & (n < outs)[None, :]
                total += tl.load(parts + start[:, None] + n[None, :], mask=filled, other=0.0)
            tl.store(biases + client * outs + n, tl.sum(total, 0), mask=n < outs)


def kernel_gradient(
    images: Tensor, grads: Tensor, border: tuple[int, int], clients: int, geometry: Geometry,
    has_bias: bool, kept: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """dw [C, h * w * channels, out] and db [C, out], float32, of images padded in memory.

    `grads` [C * B, H', W', out] may lie within a border of rows and columns. With what the
    forward pass `kept` for them they are those behind ReLU and pooling, without a border.
    """
    _, tall, wide, outs = grads.shape
    s = sizes_of(images, result_size(images, geometry), outs, geometry)
    batch, depth = len(images) // clients, s.taps * s.channels
    kind, wide_tile = "plain" if kept is None else geometry.epilogue, min(tile(outs), 128)
    block, positions, warps, stages = _tiles(depth, kind, wide_tile, images.element_size())
    tiles, wide_tiles = triton.cdiv(depth, block), triton.cdiv(outs, wide_tile)
    programs = clients * tiles * wide_tiles
    splits = _splits(programs, batch * s.rows * s.columns, 2 * PROGRAMS)
    parts = tiles if has_bias else 0
    out = torch.empty(splits, clients, depth + parts, outs, device=images.device)
    _gradient_kernel[(tiles, clients, splits * wide_tiles)](
        images, grads, grads if kept is None else kept, out, clients, batch, splits, s,
        Frame(tall, wide, *border), KIND=kind,
        windows=geometry.pool or Windows(), HAS_BIAS=has_bias, BM=positions, BN=wide_tile, BK=block,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return _gathered(out, parts)


def _tiles(depth: int, kind: str, wide_tile: int, bytes: int) -> tuple[int, int, int, int]:
    """Entries, positions at a time, warps and stages of a program of `_gradient_kernel`.

    Of few channels loads are narrow, and of winners grads are made: more stages do not hide that.
    """
    if depth >= 128:
        of_grads = wide_tile if kind == "plain" else 2 * wide_tile
        return 64, 64, 4, _stages(64 + of_grads, bytes, most=3)
    block = tile(depth)
    return block, 64, 4 if block * wide_tile <= 8192 else 8, 1 if kind == "pool" else 2


def shifted_gradient(
    images: Tensor, grads: Tensor, border: tuple[int, int], clients: int, geometry: Geometry,
    padding: Padding, has_bias: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The same for images that are not padded.

    Grads have a border that is as wide as it can be, or none.
    """
    _, tall, wide, outs = grads.shape
    s = sizes_of(images, result_size(images, geometry, padding), outs, geometry, padding)
    batch = len(images) // clients
    block, wide_tile = min(tile(s.channels), 128), min(tile(outs), 128)
    tiles, wide_tiles = triton.cdiv(s.channels, block), triton.cdiv(outs, wide_tile)
    # Of large tiles fewer programs keep a GPU busy, and to add up their parts costs more.
    large = block * wide_tile > 64 * 64
    enough = PROGRAMS // 2 if large else 3 * PROGRAMS // 2
    programs = clients * s.taps * tiles * wide_tiles
    splits = _splits(programs, batch * s.tall * s.wide, enough)
    parts = s.taps * tiles if has_bias else 0
    out = torch.empty(splits, clients, s.taps * s.channels + parts, outs, device=images.device)
    _shifted_gradient_kernel[(s.taps * tiles, clients, splits * wide_tiles)](
        images, grads, out, clients, batch, splits, s, Frame(tall, wide, *border),
        MASKED=(tall, wide) == (s.rows, s.columns),
        TURNED=block < 64 <= wide_tile, HAS_BIAS=has_bias, BM=64, BN=wide_tile, BK=block,
        num_warps=4, num_stages=_stages(block + wide_tile, images.element_size(), most=4),
    )  # fmt: skip
    return _gathered(out, parts)


def _stages(numbers: int, bytes: int, most: int) -> int:
    """How many loads of 64 positions, of this many numbers each, fit into shared memory."""
    return max(1, min(SHARED_MEMORY // (64 * numbers * bytes), most))


def _splits(programs: int, total: int, enough: int) -> int:
    """Into how many parts a sum over this many positions is split, for `enough` programs."""
    return max(1, min(enough // programs, -(-total // 256)))


def _gathered(parts: Tensor, tiles: int) -> tuple[Tensor, Tensor | None]:
    """The sums over splits of [splits, C, depth + tiles, out]: of weights, and of biases if any."""
    if not tiles:
        return parts[0] if len(parts) == 1 else parts.sum(0), None
    splits, clients, rows, outs = parts.shape
    weights = torch.empty(clients, rows - tiles, outs, device=parts.device)
    biases = torch.empty(clients, outs, device=parts.device)
    blocks = triton.cdiv((rows - tiles) * outs, 256)
    _gather_kernel[(blocks + 1, clients)](
        parts, weights, biases, clients, splits, rows - tiles, outs, tiles,
        SPLITS=min(int(triton.next_power_of_2(splits)), 16), BLOCK=256,
    )  # fmt: skip
    return weights, biases


def by_shifts(channels: int, geometry: Geometry, padding: Padding) -> bool:
    """Whether `shifted_gradient` holds, and is the faster one: it reads every pixel.

    Without padding there are fewer positions than pixels, and images need no copy within one.
    """
    (height, width), (left, right, top, bottom) = geometry.size, padding
    holds = geometry.stride == (1, 1) and left + right < width and top + bottom < height
    return holds and by_taps(channels) and any(padding)
