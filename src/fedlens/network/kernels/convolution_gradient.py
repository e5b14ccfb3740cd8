"""Triton kernels: the gradients of convolution kernels of many clients side by side.

A sum over all places of a client's images is long where the gradient is small: it is split, so that
there are programs enough to keep a GPU busy, and the parts are gathered by one more kernel.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedlens.network.kernels.convolution import Geometry, by_taps, place_of, places
from fedlens.network.kernels.sizes import PROGRAMS, Padding, tile


@triton.jit
def _gradient_kernel(
    images, slopes, out,
    clients, batch, rows: tl.constexpr, columns: tl.constexpr, tall: tl.constexpr,
    wide: tl.constexpr, channels: tl.constexpr, run: tl.constexpr, depth: tl.constexpr,
    outs: tl.constexpr, down: tl.constexpr, right: tl.constexpr, slope_tall: tl.constexpr,
    slope_wide: tl.constexpr, top: tl.constexpr, left: tl.constexpr, splits,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    client = tl.program_id(1).to(tl.int64)
    tiles = tl.cdiv(outs, BN)
    split = tl.program_id(2) // tiles
    k = tl.program_id(0) * BK + tl.arange(0, BK)
    n = tl.program_id(2) % tiles * BN + tl.arange(0, BN)
    total = batch * rows * columns
    start = images + client * batch * tall * wide * channels
    slopes += client * batch * slope_tall * slope_wide * outs
    shift = (k // run) * wide * channels + k % run
    sums = tl.zeros((BK, BN), tl.float32)
    chunks = tl.cdiv(total, BM * splits)
    for chunk in range(chunks):
        m = (split * chunks + chunk) * BM + tl.arange(0, BM)
        image, row, column = place_of(m, rows, columns)
        begin = start + ((image * tall + row * down) * wide + column * right) * channels
        inside = (m < total)[:, None]
        a = tl.load(begin[:, None] + shift[None, :], mask=inside & (k < depth)[None, :], other=0.0)
        place = ((image * slope_tall + row + top) * slope_wide + column + left) * outs
        d = tl.load(
            slopes + place[:, None] + n[None, :], mask=inside & (n < outs)[None, :], other=0.0
        )
        sums = tl.dot(tl.trans(a), d, sums, input_precision="tf32")
    out += (split * clients + client) * (depth + tl.num_programs(0)) * outs
    there = (k < depth)[:, None] & (n < outs)[None, :]
    tl.store(out + k[:, None] * outs + n[None, :], sums, mask=there)
    cells = batch * slope_tall * slope_wide
    bias = _some_slopes(slopes, cells, split, splits, n, outs, BM, BN)
    tl.store(out + (depth + tl.program_id(0)) * outs + n, bias, mask=n < outs)


@triton.jit
def _shifted_gradient_kernel(
    images, slopes, out,
    clients, batch, tall: tl.constexpr, wide: tl.constexpr, channels: tl.constexpr,
    width: tl.constexpr, taps: tl.constexpr, outs: tl.constexpr, slope_tall: tl.constexpr,
    slope_wide: tl.constexpr, border_top: tl.constexpr, border_left: tl.constexpr,
    top: tl.constexpr, left: tl.constexpr, splits,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """One tap a program: image places p times the slopes at p - tap, which have a border of 0."""
    client = tl.program_id(1).to(tl.int64)
    tiles = tl.cdiv(outs, BN)
    split = tl.program_id(2) // tiles
    tap = tl.program_id(0) % taps
    k = tl.program_id(0) // taps * BK + tl.arange(0, BK)
    n = tl.program_id(2) % tiles * BN + tl.arange(0, BN)
    total = batch * tall * wide
    images += client * total * channels
    slopes += client * batch * slope_tall * slope_wide * outs
    up, back = tap // width - top, tap % width - left
    shifted = slopes + ((border_top - up) * slope_wide + border_left - back) * outs
    sums = tl.zeros((BK, BN), tl.float32)
    chunks = tl.cdiv(total, BM * splits)
    for chunk in range(chunks):
        m = (split * chunks + chunk) * BM + tl.arange(0, BM)
        image, row, column = place_of(m, tall, wide)
        inside = (m < total)[:, None]
        there = inside & (k < channels)[None, :]
        a = tl.load(images + m[:, None] * channels + k[None, :], mask=there, other=0.0)
        place = ((image * slope_tall + row) * slope_wide + column) * outs
        there = inside & (n < outs)[None, :]
        d = tl.load(shifted + place[:, None] + n[None, :], mask=there, other=0.0)
        sums = tl.dot(tl.trans(a), d, sums, input_precision="tf32")
    out += (split * clients + client) * (taps * channels + tl.num_programs(0)) * outs
    there = (k < channels)[:, None] & (n < outs)[None, :]
    tl.store(out + (tap * channels + k)[:, None] * outs + n[None, :], sums, mask=there)
    cells = batch * slope_tall * slope_wide
    bias = _some_slopes(slopes, cells, split, splits, n, outs, BM, BN)
    tl.store(out + (taps * channels + tl.program_id(0)) * outs + n, bias, mask=n < outs)


@triton.jit
def _some_slopes(
    slopes, cells, split, splits, n, outs: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr
):  # fmt: skip
    """This program's part of the gradient of the bias, in a loop of its own."""
    sums = tl.zeros((BM, BN), tl.float32)
    first = tl.program_id(0) * splits + split
    for chunk in range(first, tl.cdiv(cells, BM), tl.num_programs(0) * splits):
        m = chunk * BM + tl.arange(0, BM)
        there = (m < cells)[:, None] & (n < outs)[None, :]
        sums += tl.load(slopes + m[:, None] * outs + n[None, :], mask=there, other=0.0)
    return tl.sum(sums, 0)


@triton.jit
def _gather_kernel(
    parts, weights, biases, clients, depth: tl.constexpr, outs: tl.constexpr,
    tiles: tl.constexpr, splits, blocks, SPLITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The sum of the splits: programs of the weights first, then one a client of the biases."""
    each = (depth + tiles) * outs
    s = tl.arange(0, SPLITS)
    sums = tl.zeros((SPLITS, BLOCK), tl.float32)
    if tl.program_id(0) < blocks:
        i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        client, place = i // (depth * outs), i % (depth * outs)
        for first in range(0, splits, SPLITS):
            split = first + s
            there = (split < splits)[:, None] & (client < clients)[None, :]
            start = (split.to(tl.int64) * clients * each)[:, None] + client[None, :] * each
            sums += tl.load(parts + start + place[None, :], mask=there, other=0.0)
        tl.store(weights + i, tl.sum(sums, 0), mask=client < clients)
    else:
        whose = tl.program_id(0) - blocks
        for column in range(0, outs, BLOCK):
            n = column + tl.arange(0, BLOCK)
            total = tl.zeros((16, BLOCK), tl.float32)
            for number in range(0, splits * tiles, 16):
                which = number + tl.arange(0, 16)
                part, row = which // tiles, depth + which % tiles
                entry = (part.to(tl.int64) * clients + whose) * each + row * outs
                filled = (part < splits)[:, None] & (n < outs)[None, :]
                total += tl.load(parts + entry[:, None] + n[None, :], mask=filled, other=0.0)
            tl.store(biases + whose * outs + n, tl.sum(total, 0), mask=n < outs)


def kernel_gradient(
    images: Tensor, slopes: Tensor, border: tuple[int, int], clients: int, geometry: Geometry
) -> tuple[Tensor, Tensor]:
    """Gradients of kernels and biases, float32: [C, h * w * channels, out] and [C, out].

    `slopes` [C * B, H', W', out] may lie within a border of so many rows and columns.
    """
    count, tall, wide, channels = images.shape
    _, slope_tall, slope_wide, outs = slopes.shape
    rows, columns = places(images, geometry)
    depth = geometry.size[0] * geometry.size[1] * channels
    total = count // clients * rows * columns
    deep = depth >= 128
    block, wide_tile = 64 if deep else tile(depth), min(tile(outs), 128)
    tiles, wide_tiles = triton.cdiv(depth, block), triton.cdiv(outs, wide_tile)
    stages = 3 if deep else 1  # narrow loads come one by one anyway
    splits = _splits(clients * tiles * wide_tiles, total)
    out = torch.empty(splits, clients, depth + tiles, outs, device=images.device)
    _gradient_kernel[(tiles, clients, splits * wide_tiles)](
        images, slopes, out, clients, count // clients, rows, columns, tall, wide,
        channels, geometry.size[1] * channels, depth, outs, *geometry.stride,
        slope_tall, slope_wide, *border, splits, BM=128, BN=wide_tile, BK=block,
        num_warps=4 if block * wide_tile <= 8192 else 8, num_stages=stages,
    )  # fmt: skip
    return _gathered(out, tiles)


def shifted_gradient(
    images: Tensor, slopes: Tensor, border: tuple[int, int], clients: int, geometry: Geometry,
    padding: Padding,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The same for images without a border, under slopes whose border is as wide as it can be."""
    count, tall, wide, channels = images.shape
    _, slope_tall, slope_wide, outs = slopes.shape
    height, width = geometry.size
    taps, (left, _, top, _) = height * width, padding
    block, wide_tile = min(tile(channels), 128), min(tile(outs), 128)
    tiles, wide_tiles = triton.cdiv(channels, block), triton.cdiv(outs, wide_tile)
    splits = _splits(clients * taps * tiles * wide_tiles, count // clients * tall * wide)
    out = torch.empty(splits, clients, taps * (channels + tiles), outs, device=images.device)
    _shifted_gradient_kernel[(taps * tiles, clients, splits * wide_tiles)](
        images, slopes, out, clients, count // clients, tall, wide, channels, width, taps, outs,
        slope_tall, slope_wide, *border, top, left, splits, BM=64, BN=wide_tile, BK=block,
        num_warps=4 if block * wide_tile <= 8192 else 8, num_stages=3,
    )  # fmt: skip
    return _gathered(out, taps * tiles)


def _splits(programs: int, total: int) -> int:
    """Into how many parts a sum over so many places is split, to keep the GPU busy."""
    return max(1, min(2 * PROGRAMS // programs, -(-total // 256)))


def _gathered(parts: Tensor, tiles: int) -> tuple[Tensor, Tensor]:
    """The sum over splits of [splits, C, depth + tiles, out]: weights, and biases, in tiles."""
    splits, clients, rows, outs = parts.shape
    weights = torch.empty(clients, rows - tiles, outs, device=parts.device)
    biases = torch.empty(clients, outs, device=parts.device)
    blocks = triton.cdiv(weights.numel(), 256)
    _gather_kernel[(blocks + clients,)](
        parts, weights, biases, clients, rows - tiles, outs, tiles, splits, blocks,
        SPLITS=min(int(triton.next_power_of_2(splits)), 16), BLOCK=256,
    )  # fmt: skip
    return weights, biases


def by_shifts(channels: int, geometry: Geometry, padding: Padding) -> bool:
    """Whether `shifted_gradient` holds, and is the faster one."""
    (height, width), (left, right, top, bottom) = geometry.size, padding
    holds = geometry.stride == (1, 1) and left + right < width and top + bottom < height
    return holds and by_taps(channels) and (channels >= 64 or any(padding))
