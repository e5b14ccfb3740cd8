"""Triton kernels: convolutions of many clients as products whose patches stay in registers.

Images are [C * B, H, W, channels], padded already, so that no place is outside. Row m of a client's
patches starts at one address, and entry k of it lies (k // run) image rows and k % run numbers
further, where a run is the width of the kernel times the channels.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAMS = 264  # twice the processors of a large GPU: as many as keep it busy


@triton.jit
def _row_starts(m, rows, columns, tall, wide, channels):
    """Where the patches of output places m start, within a client's images."""
    image = m // (rows * columns)
    place = m % (rows * columns)
    return ((image * tall + place // columns) * wide + place % columns) * channels


@triton.jit
def _product_kernel(
    images, kernel, bias, out,
    batch, rows, columns, tall, wide, channels, run, depth,
    outs, HAS_BIAS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    client = tl.program_id(1).to(tl.int64)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.arange(0, BN)
    total = batch * rows * columns
    inside = (m < total)[:, None]
    start = images + client * batch * tall * wide * channels
    start += _row_starts(m, rows, columns, tall, wide, channels)
    weights = kernel + client * depth * outs
    sums = tl.zeros((BM, BN), tl.float32)
    for first in range(0, depth, BK):
        k = first + tl.arange(0, BK)
        shift = (k // run) * wide * channels + k % run
        a = tl.load(start[:, None] + shift[None, :], mask=inside & (k < depth)[None, :], other=0.0)
        there = (k < depth)[:, None] & (n < outs)[None, :]
        b = tl.load(weights + k[:, None] * outs + n[None, :], mask=there, other=0.0)
        sums = tl.dot(a, b, sums)
    if HAS_BIAS:
        sums += tl.load(bias + client * outs + n, mask=n < outs, other=0.0).to(tl.float32)[None, :]
    place = out + (client * total + m)[:, None] * outs + n[None, :]
    tl.store(place, sums.to(out.dtype.element_ty), mask=inside & (n < outs)[None, :])


@triton.jit
def _gradient_kernel(
    images, rows_in, out,
    clients, batch, rows, columns, tall, wide, channels,
    run, depth, outs, splits, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    client = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    k = tl.program_id(0) * BK + tl.arange(0, BK)
    n = tl.arange(0, BN)
    total = batch * rows * columns
    start = images + client * batch * tall * wide * channels
    shift = (k // run) * wide * channels + k % run
    sums = tl.zeros((BK, BN), tl.float32)
    chunks = tl.cdiv(total, BM * splits)
    for chunk in range(chunks):
        m = (split * chunks + chunk) * BM + tl.arange(0, BM)
        begin = start + _row_starts(m, rows, columns, tall, wide, channels)
        inside = (m < total)[:, None]
        a = tl.load(begin[:, None] + shift[None, :], mask=inside & (k < depth)[None, :], other=0.0)
        place = rows_in + (client * total + m)[:, None] * outs + n[None, :]
        d = tl.load(place, mask=inside & (n < outs)[None, :], other=0.0)
        sums = tl.dot(tl.trans(a), d, sums)
    target = out + ((split * clients + client) * depth + k)[:, None] * outs + n[None, :]
    tl.store(target, sums, mask=(k < depth)[:, None] & (n < outs)[None, :])


def product(images: Tensor, kernel: Tensor, bias: Tensor | None, size: tuple[int, int]) -> Tensor:
    """Patches of images [C * B, H, W, channels] times kernels [C, h * w * channels, out]."""
    clients, depth, outs = kernel.shape
    count, tall, wide, channels = images.shape
    batch, rows, columns = count // clients, tall - size[0] + 1, wide - size[1] + 1
    out = images.new_empty(clients, batch * rows * columns, outs)
    block = 128
    _product_kernel[(triton.cdiv(batch * rows * columns, block), clients)](
        images, kernel, kernel if bias is None else bias.contiguous(), out,
        batch, rows, columns, tall, wide, channels, size[1] * channels, depth,
        outs, HAS_BIAS=bias is not None, BM=block, BN=_tile(outs), BK=32 if depth < 64 else 64,
        num_warps=4 if outs <= 64 else 8, num_stages=3,
    )  # fmt: skip
    return out


def kernel_gradient(images: Tensor, rows: Tensor, size: tuple[int, int]) -> Tensor:
    """Patches of images times rows [C, B * H * W, out], in float32: [C, h * w * channels, out]."""
    clients, total, outs = rows.shape
    count, tall, wide, channels = images.shape
    height, width = tall - size[0] + 1, wide - size[1] + 1
    depth, block = size[0] * size[1] * channels, 64
    tiles = triton.cdiv(depth, block)
    splits = max(1, min(PROGRAMS // (clients * tiles), triton.cdiv(total, 256)))
    out = torch.empty(splits, clients, depth, outs, device=rows.device)
    _gradient_kernel[(tiles, clients, splits)](
        images, rows.contiguous(), out,
        clients, count // clients, height, width, tall, wide, channels, size[1] * channels,
        depth, outs, splits, BM=64, BN=_tile(outs), BK=block,
        num_warps=4, num_stages=3,
    )  # fmt: skip
    return out.sum(0)


def _tile(number: int) -> int:
    """The least power of two that holds `number`, as large as a product needs it."""
    return max(16, int(triton.next_power_of_2(number)))
