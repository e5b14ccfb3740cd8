"""Triton kernels for privacy: noise by key, and what is clipped.

DP-SGD adds noise to the sum of clipped gradients, which becomes a mean; privacy of clients needs
normal numbers, and shortens updates.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedlens.core.keys import GOLDEN, signed
from fedlens.network.kernels.dropout import _GOLDEN, _mix
from fedlens.network.kernels.launch import launchable

BLOCK = 1024  # words of a program: each is two numbers
_UNIT, _TURN = tl.constexpr(2.0**-32), tl.constexpr(2 * math.pi * 2.0**-32)
_FINE, _WHOLE_TURN = tl.constexpr(2.0**-53), tl.constexpr(2 * math.pi)


@launchable(do_not_specialize=["number"])
def _noisy_mean_kernel(
    total, client_keys, std, counts, out, number, size, half, BLOCK: tl.constexpr
):  # fmt: skip
    """out[c, i] = (total[c, i] + std[c] z[i]) / counts[c], with z of `keys.pairs_of_normals`:
    word i gives numbers i and half + i. Program (j, c) takes BLOCK words of client c."""
    client = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    dtype: tl.constexpr = total.dtype.element_ty
    word = _mix(i * _GOLDEN + _mix(tl.load(client_keys + client) + number))
    high = (word >> 32) & 0xFFFFFFFF
    low = word & 0xFFFFFFFF
    squared = -2.0 * tl.log((high.to(dtype) + 0.5) * _UNIT)
    radius = tl.sqrt(tl.maximum(squared, 0.0)) * tl.load(std + client).to(dtype)
    angle = low.to(dtype) * _TURN
    count = tl.load(counts + client).to(dtype)
    for part in tl.static_range(2):
        place = i + part * half
        there = (i < half) & (place < size)
        z = radius * (tl.cos(angle) if part == 0 else tl.sin(angle))
        value = tl.load(total + client * size + place, mask=there, other=0.0)
        tl.store(out + client * size + place, (z + value) / count, mask=there)


def noisy_mean(
    total: Tensor, client_keys: Tensor, number: int, std: Tensor, counts: Tensor
) -> Tensor:
    rows = total.contiguous()  # in the order in which noise is drawn
    out, size = torch.empty_like(rows), rows[0].numel()
    half = -(-size // 2)
    grid = triton.cdiv(half, BLOCK), len(total)
    word = signed(number * GOLDEN)
    _noisy_mean_kernel[grid](rows, client_keys, std, counts, out, word, size, half, BLOCK=BLOCK)
    return out if rows is total else torch.empty_like(total).copy_(out)


@triton.jit
def _uniform(key):
    """`keys.uniform`: a number in [0, 1), float64."""
    return (key.to(tl.uint64) >> 11).to(tl.float64) * _FINE


@launchable(do_not_specialize=["key"])
def _normals_kernel(out, key, count, half, BLOCK: tl.constexpr):
    """`keys.normals`: word i gives out[i] and out[half + i]; a program takes BLOCK words."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    word = _mix(i * _GOLDEN + key)
    # 1 - u is exact, so that this logarithm is as good as that of 1 + x.
    radius = tl.sqrt(-2.0 * tl.log(1.0 - _uniform(_mix(word))))
    angle = _uniform(_mix(word + _GOLDEN)) * _WHOLE_TURN
    tl.store(out + i, radius * tl.cos(angle), mask=i < half)
    tl.store(out + half + i, radius * tl.sin(angle), mask=half + i < count)


def normals(key: int, count: int, device: torch.device) -> Tensor:
    """`keys.normals` on a GPU."""
    out, half = torch.empty(count, dtype=torch.float64, device=device), -(-count // 2)
    _normals_kernel[(triton.cdiv(half, BLOCK),)](out, key, count, half, BLOCK=BLOCK)
    return out


@launchable
def _shorten_kernel(rows, factors, width, BLOCK: tl.constexpr):
    """rows[c, i] *= factors[c], or 0 where the factor is 0; program (j, c) takes BLOCK of them."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    client = tl.program_id(1).to(tl.int64)
    entry, factor = rows + client * width + i, tl.load(factors + client)
    value = tl.load(entry, mask=i < width, other=0.0) * factor
    tl.store(entry, tl.where(factor == 0, 0.0, value), mask=i < width)


def shorten_(rows: Tensor, factors: Tensor) -> None:
    clients, width = rows.shape
    _shorten_kernel[(triton.cdiv(width, BLOCK), clients)](rows, factors, width, BLOCK=BLOCK)
