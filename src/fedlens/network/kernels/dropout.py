"""Triton kernels for dropout by key: `layers.keyed_dropout` of C clients.

Position i of row b is kept if lane i % 4, a signed number of 16 bits, is at least
num_dropped - 2^15 in

    hash(b, i // 4) = mix((b << 32 | i // 4) * GOLDEN + mix(key of the client + word))
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedlens.core.keys import FIRST, GOLDEN, SECOND, signed
from fedlens.network.kernels.launch import launchable
from fedlens.network.kernels.sizes import Drops, tile

_FIRST, _SECOND = tl.constexpr(signed(FIRST)), tl.constexpr(signed(SECOND))
_GOLDEN = tl.constexpr(signed(GOLDEN))

BLOCK = 1024  # elements of a program


@triton.jit
def _mix(z):
    """`keys._mix`: splitmix64's finaliser."""
    z ^= (z.to(tl.uint64) >> 30).to(tl.int64)
    z *= _FIRST
    z ^= (z.to(tl.uint64) >> 27).to(tl.int64)
    z *= _SECOND
    return z ^ (z.to(tl.uint64) >> 31).to(tl.int64)


@triton.jit
def _is_kept(hashed, lane, num_dropped):
    """Whether lane 0 to 3 of a hash, a number from -2^15 up, is at least num_dropped - 2^15."""
    return (hashed >> (16 * lane)).to(tl.int16) >= num_dropped - 32768


@triton.jit
def kept_positions(
    client_keys, client, word, row, first, num_dropped, BM: tl.constexpr, BN: tl.constexpr
):  # fmt: skip
    """Whether positions first[m] + n of rows row[m] are kept: [BM, BN]. 4 divides first[m]."""
    key = _mix(tl.load(client_keys + client) + word)
    four = (first // 4)[:, None] + tl.arange(0, BN // 4)[None, :]
    hashed = _mix(((row.to(tl.int64) << 32)[:, None] | four.to(tl.int64)) * _GOLDEN + key)
    kept = _is_kept(hashed[:, :, None], tl.arange(0, 4)[None, None, :], num_dropped)
    return tl.reshape(kept, (BM, BN))


@launchable
def _dropout_kernel(
    x, client_keys, out, word, batch, width, channels, num_dropped, scale, BLOCK: tl.constexpr
):  # fmt: skip
    """out[row, i] = x[row, i] * scale if position i % channels is kept, else 0.

    A row is an example of `width` elements; program (row, j) computes BLOCK of them. Four positions
    share a hash: see `layers.keyed_dropout`.
    """
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there, position = i < width, i % channels
    key = _mix(tl.load(client_keys + row // batch) + word)
    counter = ((row % batch) << 32) | (position // 4).to(tl.int64)
    hashed = _mix(counter * _GOLDEN + key)
    value = tl.load(x + row * width + i, mask=there, other=0.0).to(tl.float32)
    kept = tl.where(_is_kept(hashed, position % 4, num_dropped), value * scale, 0.0)
    tl.store(out + row * width + i, kept.to(out.dtype.element_ty), mask=there)


@launchable
def _row_dropout_kernel(
    x, client_keys, out, word, batch, width, num_dropped, scale, BLOCK: tl.constexpr
):  # fmt: skip
    """out[row, i] = x[row, i] * scale if position i is kept, else 0.

    Program (row, j) computes BLOCK hashes, each for four elements.
    """
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    key = _mix(tl.load(client_keys + row // batch) + word)
    hashed = _mix((((row % batch) << 32) | i.to(tl.int64)) * _GOLDEN + key)
    each = tl.arange(0, 4)
    entry = row * width + i[:, None] * 4 + each[None, :]
    there = (i < width // 4)[:, None]
    value = tl.load(x + entry, mask=there, other=0.0).to(tl.float32)
    kept = tl.where(_is_kept(hashed[:, None], each[None, :], num_dropped), value * scale, 0.0)
    tl.store(out + entry, kept.to(out.dtype.element_ty), mask=there)


def dropout(x: Tensor, client_keys: Tensor, drops: Drops, *, whole_channels: bool) -> Tensor:
    """`layers.keyed_dropout` of channels-last images [C * B, channels, H, W] or rows [C, B, n]."""
    is_images = x.ndim == 4
    out = torch.empty_like(x)
    batch = x.shape[0] // len(client_keys) if is_images else x.shape[1]
    width = x.shape[1:].numel() if is_images else x.shape[2]
    rows, (word, num_dropped) = x.numel() // width, drops
    if not whole_channels and width % 4 == 0:
        block = min(tile(width // 4), 512)
        _row_dropout_kernel[(rows, triton.cdiv(width // 4, block))](
            x, client_keys, out, word, batch, width, num_dropped, drops.scale, BLOCK=block
        )
        return out
    channels = x.shape[1] if is_images and whole_channels else width
    _dropout_kernel[(rows, triton.cdiv(width, BLOCK))](
        x, client_keys, out, word, batch, width, channels, num_dropped, drops.scale, BLOCK=BLOCK
    )
    return out
