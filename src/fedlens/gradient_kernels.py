"""Triton kernels: the gradients of convolution kernels of many clients side by side.

A sum over all places of a client's images is long where the gradient is small: it is split, so that
there are programs enough to keep a GPU busy, and the parts are gathered by one more kernel.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedlens.fused import Padding
from fedlens.kernels import PROGRAMS, Geometry, by_taps, place_of, places, tile


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
    out += (split * clients + client) * (depth + 1) * outs
    there = (k < depth)[:, None] & (n < outs)[None, :]
    tl.store(out + k[:, None] * outs + n[None, :], sums, mask=there)
    if tl.program_id(0) == 0:
        slopes += (top * slope_wide + left) * outs
        bias = _sum_of_slopes(
            slopes, total, split, chunks, n, rows, columns, slope_tall, slope_wide, outs, BM, BN
        )
        tl.store(out + depth * outs + n, bias, mask=n < outs)


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
    slopes += ((border_top - up) * slope_wide + border_left - back) * outs
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
        d = tl.load(slopes + place[:, None] + n[None, :], mask=there, other=0.0)
        sums = tl.dot(tl.trans(a), d, sums, input_precision="tf32")
    out += (split * clients + client) * (taps * channels + 1) * outs
    there = (k < channels)[:, None] & (n < outs)[None, :]
    tl.store(out + (tap * channels + k)[:, None] * outs + n[None, :], sums, mask=there)
    if (tl.program_id(0) < taps) & (up == 0) & (back == 0):  # a tap that meets every slope once
        bias = _sum_of_slopes(
            slopes, total, split, chunks, n, tall, wide, slope_tall, slope_wide, outs, BM, BN
        )
        tl.store(out + taps * channels * outs + n, bias, mask=n < outs)


@triton.jit
def _sum_of_slopes(
    slopes, total, split, chunks, n, rows: tl.constexpr, columns: tl.constexpr,
    slope_tall: tl.constexpr, slope_wide: tl.constexpr, outs: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    """The gradient of the bias: in a loop of its own, since a branch makes the other one slow."""
    sums = tl.zeros((BM, BN), tl.float32)
    for chunk in range(chunks):
        m = (split * chunks + chunk) * BM + tl.arange(0, BM)
        image, row, column = place_of(m, rows, columns)
        place = ((image * slope_tall + row) * slope_wide + column) * outs
        there = (m < total)[:, None] & (n < outs)[None, :]
        sums += tl.load(slopes + place[:, None] + n[None, :], mask=there, other=0.0).to(tl.float32)
    return tl.sum(sums, 0)


@triton.jit
def _gather_kernel(
    parts, weights, biases, each, depth: tl.constexpr, outs: tl.constexpr, splits,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The sum of the splits, weights and biases apart."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = i < each
    total = tl.zeros((BLOCK,), tl.float32)
    for _ in range(splits):
        total += tl.load(parts + i, mask=there, other=0.0)
        parts += each
    client, place = i // ((depth + 1) * outs), i % ((depth + 1) * outs)
    of_bias = place >= depth * outs
    tl.store(weights + client * depth * outs + place, total, mask=there & (of_bias == 0))
    tl.store(biases + client * outs + place - depth * outs, total, mask=there & of_bias)


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
    out = torch.empty(splits, clients, depth + 1, outs, device=images.device)
    _gradient_kernel[(tiles, clients, splits * wide_tiles)](
        images, slopes, out, clients, count // clients, rows, columns, tall, wide,
        channels, geometry.size[1] * channels, depth, outs, *geometry.stride,
        slope_tall, slope_wide, *border, splits, BM=128, BN=wide_tile, BK=block,
        num_warps=4 if block * wide_tile <= 8192 else 8, num_stages=stages,
    )  # fmt: skip
    return _gathered(out)


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
    out = torch.empty(splits, clients, taps * channels + 1, outs, device=images.device)
    _shifted_gradient_kernel[(taps * tiles, clients, splits * wide_tiles)](
        images, slopes, out, clients, count // clients, tall, wide, channels, width, taps, outs,
        slope_tall, slope_wide, *border, top, left, splits, BM=64, BN=wide_tile, BK=block,
        num_warps=4 if block * wide_tile <= 8192 else 8, num_stages=3,
    )  # fmt: skip
    return _gathered(out)


def _splits(programs: int, total: int) -> int:
    """Into how many parts a sum over so many places is split, to keep the GPU busy."""
    return max(1, min(2 * PROGRAMS // programs, -(-total // 256)))


def _gathered(parts: Tensor) -> tuple[Tensor, Tensor]:
    """The sum over splits of [splits, C, depth + 1, out]: weights, and biases, the last row."""
    splits, clients, rows, outs = parts.shape
    weights = torch.empty(clients, rows - 1, outs, device=parts.device)
    biases = torch.empty(clients, outs, device=parts.device)
    each = clients * rows * outs
    _gather_kernel[(triton.cdiv(each, 1024),)](
        parts, weights, biases, each, rows - 1, outs, splits, BLOCK=1024
    )
    return weights, biases


def by_shifts(channels: int, geometry: Geometry, padding: Padding) -> bool:
    """Whether `shifted_gradient` holds, and is the faster one."""
    (height, width), (left, right, top, bottom) = geometry.size, padding
    holds = geometry.stride == (1, 1) and left + right < width and top + bottom < height
    return holds and by_taps(channels) and (channels >= 64 or any(padding))
