"""Triton kernel for DP-SGD: noise on the sum of clipped gradients, which becomes a mean."""

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
