"""Triton kernels for batch normalisation of C clients, then an optional addition and ReLU.

Images are [C, B * pixels, channels]; rows are the pixels of a client's batch. With the mean and
the variance of a channel over the client's n rows that are not padding,

    normal = (x - mean) / sqrt(var + eps), and 0 in padding
    z = normal * weight[c, channel] + bias[c, channel] + around
    y = z, max(z, 0) for ReLU, or min(max(z, 0), 6) for ReLU6

and from the grads dy, with g = dy where the ReLU passes it, else 0, and 0 in padding,

    dweight = sum of g * normal,   dbias = sum of g,   daround = g
    dx = weight * (g - (dbias + normal * dweight) / n) / sqrt(var + eps), and 0 in padding

Running statistics are updated as in PyTorch, unless all of the batch is padding:

    running_mean += momentum * (mean - running_mean)
    running_var += momentum * (var * n / max(n - 1, 1) - running_var)

A program computes some channels of one client. It reads all of their rows twice: for the sums,
and, the second time from the cache, for the result.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedlens.network.kernels.follows import (
    Follows,
    affine,
    back_through_relu,
    before_relu,
    or_any,
    through_relu,
)
from fedlens.network.kernels.launch import launchable
from fedlens.network.layers import Running

COLUMNS = 16  # channels of a program: in bfloat16 32 bytes, the least that one memory access reads
TILE = 8192  # elements that a program holds at a time
SIZES = ["batch", "pixels", "channels"]  # not specialised: too many values


@triton.jit
def _real_rows(mask, r, batch, pixels):
    """Which rows r of a batch are not padding; `mask` [B] is nonzero for its examples."""
    return tl.load(mask + r // pixels, mask=r < batch * pixels, other=0) != 0


@launchable(do_not_specialize=SIZES)
def _batch_norm_kernel(
    x, weight, bias, around, mask, y, means, scales, running_mean, running_var, batches,
    momentum, eps, batch, pixels, channels,
    f: tl.constexpr, TRACKED: tl.constexpr, UNIT: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """y as above, means and scales 1 / sqrt(var + eps) [C, channels]; running statistics in place.

    Program (i, j) computes block j of the channels of client i.
    """
    client = tl.program_id(0).to(tl.int64)
    channels = channels // UNIT * UNIT  # tells the compiler that UNIT divides it
    k = tl.program_id(1) * BC + tl.arange(0, BC)
    here, rows, entry_of_client = k < channels, batch * pixels, client * channels + k
    start, mask = client * rows * channels, mask + client * batch
    # Sums are of differences to the first row: a large mean would lose precision.
    known = here & _real_rows(mask, tl.zeros_like(k), batch, pixels)
    first = tl.load(x + start + k, mask=known, other=0.0).to(tl.float32)
    sums = tl.zeros((BR, BC), tl.float32)
    squares = tl.zeros((BR, BC), tl.float32)
    counts = tl.zeros((BR,), tl.float32)
    for begin in range(0, rows, BR):
        r = begin + tl.arange(0, BR)
        real = _real_rows(mask, r, batch, pixels)
        there = real[:, None] & here[None, :]
        entry = start + r[:, None] * channels + k[None, :]
        value = tl.load(x + entry, mask=there, other=0.0).to(tl.float32)
        centred = tl.where(there, value - first[None, :], 0.0)
        sums += centred
        squares += centred * centred
        counts += real.to(tl.float32)
    count = tl.sum(counts, 0)
    n = tl.maximum(count, 1.0)
    mean = tl.sum(sums, 0) / n
    var = tl.maximum(tl.sum(squares, 0) / n - mean * mean, 0.0)
    mean += first
    scale = 1 / tl.sqrt(var + eps)
    tl.store(means + entry_of_client, mean, mask=here)
    tl.store(scales + entry_of_client, scale, mask=here)
    if TRACKED:
        share = tl.where(count > 0, momentum, 0.0)
        before = tl.load(running_mean + entry_of_client, mask=here, other=0.0)
        tl.store(running_mean + entry_of_client, before + share * (mean - before), mask=here)
        before = tl.load(running_var + entry_of_client, mask=here, other=0.0)
        unbiased = var * (n / tl.maximum(n - 1, 1.0))
        tl.store(running_var + entry_of_client, before + share * (unbiased - before), mask=here)
        if tl.program_id(1) == 0:
            seen = tl.load(batches + client)
            tl.store(batches + client, seen + (count > 0).to(seen.dtype))
    w, b = affine(weight, bias, entry_of_client, here, f)
    for begin in range(0, rows, BR):
        r = begin + tl.arange(0, BR)
        there = (r < rows)[:, None] & here[None, :]
        real = _real_rows(mask, r, batch, pixels)[:, None]
        entry = start + r[:, None] * channels + k[None, :]
        value = tl.load(x + entry, mask=there & real, other=0.0).to(tl.float32)
        normal = tl.where(real, (value - mean[None, :]) * scale[None, :], 0.0)
        z = before_relu(normal, w, b, around, entry, there, f)
        tl.store(y + entry, through_relu(z, f).to(y.dtype.element_ty), mask=there)


@launchable(do_not_specialize=SIZES)
def _batch_norm_gradient_kernel(
    dy, x, weight, bias, around, mask, means, scales, dx, daround, dweight, dbias,
    batch, pixels, channels,
    f: tl.constexpr, UNIT: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """dx, daround, and dweight and dbias [C, channels], as above.

    Programs have the same blocks as in `_batch_norm_kernel`.
    """
    client = tl.program_id(0).to(tl.int64)
    channels = channels // UNIT * UNIT  # tells the compiler that UNIT divides it
    k = tl.program_id(1) * BC + tl.arange(0, BC)
    here, rows, entry_of_client = k < channels, batch * pixels, client * channels + k
    start, mask = client * rows * channels, mask + client * batch
    mean = tl.load(means + entry_of_client, mask=here, other=0.0)
    scale = tl.load(scales + entry_of_client, mask=here, other=0.0)
    w, b = affine(weight, bias, entry_of_client, here, f)
    products = tl.zeros((BR, BC), tl.float32)
    sums = tl.zeros((BR, BC), tl.float32)
    counts = tl.zeros((BR,), tl.float32)
    for begin in range(0, rows, BR):
        r = begin + tl.arange(0, BR)
        real = _real_rows(mask, r, batch, pixels)
        there = real[:, None] & here[None, :]
        entry = start + r[:, None] * channels + k[None, :]
        value = tl.load(x + entry, mask=there, other=0.0).to(tl.float32)
        normal = (value - mean[None, :]) * scale[None, :]
        grad = tl.load(dy + entry, mask=there, other=0.0).to(tl.float32)
        z = before_relu(normal, w, b, around, entry, there, f)
        grad = back_through_relu(grad, z, f)
        products += grad * normal
        sums += grad
        counts += real.to(tl.float32)
    n = tl.maximum(tl.sum(counts, 0), 1.0)
    product, total = tl.sum(products, 0), tl.sum(sums, 0)
    tl.store(dweight + entry_of_client, product, mask=here)
    tl.store(dbias + entry_of_client, total, mask=here)
    along, level = product / n, total / n
    for begin in range(0, rows, BR):
        r = begin + tl.arange(0, BR)
        there = (r < rows)[:, None] & here[None, :]
        real = _real_rows(mask, r, batch, pixels)[:, None]
        entry = start + r[:, None] * channels + k[None, :]
        value = tl.load(x + entry, mask=there & real, other=0.0).to(tl.float32)
        normal = (value - mean[None, :]) * scale[None, :]
        grad = tl.load(dy + entry, mask=there & real, other=0.0).to(tl.float32)
        z = before_relu(normal, w, b, around, entry, there & real, f)
        grad = back_through_relu(grad, z, f)
        if f.around and f.relu:
            tl.store(daround + entry, grad.to(daround.dtype.element_ty), mask=there)
        grad = (grad - level[None, :] - normal * along[None, :]) * (w * scale)[None, :]
        grad = tl.where(real, grad, 0.0)
        tl.store(dx + entry, grad.to(dx.dtype.element_ty), mask=there)


def batch_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, around: Tensor | None,
    mask: Tensor, eps: float, running: Running | None, follows: Follows,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """y of images [C * B, H, W, channels], and statistics [2, C, channels]; mask is [C, B]."""
    y, stats = torch.empty_like(x), _of_channels(x, mask)
    grid, sizes = _blocks(x, mask)
    *tracked, momentum = running or (None, None, None, 0.0)
    _batch_norm_kernel[grid](
        x, *or_any(x, weight, bias, around), mask, y, *stats, *or_any(x, *tracked), momentum, eps,
        **sizes, f=follows, TRACKED=running is not None,
    )  # fmt: skip
    return y, stats


def batch_norm_gradient(
    dy: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, around: Tensor | None,
    mask: Tensor, stats: Tensor, follows: Follows,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dx, daround, and the gradients [2, C, channels] of weight and bias, in float32.

    If no ReLU follows, daround is dy itself.
    """
    dx, sums = torch.empty_like(x), _of_channels(x, mask)
    daround = torch.empty_like(x) if follows.around and follows.relu else dy
    grid, sizes = _blocks(x, mask)
    _batch_norm_gradient_kernel[grid](
        dy, x, *or_any(x, weight, bias, around), mask, *stats, dx, daround, *sums,
        **sizes, f=follows,
    )  # fmt: skip
    return dx, daround, sums


def _of_channels(x: Tensor, mask: Tensor) -> Tensor:
    return torch.empty(2, len(mask), x.shape[-1], dtype=torch.float32, device=x.device)


def _blocks(x: Tensor, mask: Tensor) -> tuple[tuple[int, int], dict[str, int]]:
    """The grid of programs, and their block sizes: a tile of rows and channels."""
    (clients, batch), channels, pixels = mask.shape, x.shape[-1], x[0, ..., 0].numel()
    rows = min(int(triton.next_power_of_2(batch * pixels)), TILE // COLUMNS)
    sizes = {
        "batch": batch,
        "pixels": pixels,
        "channels": channels,
        "UNIT": math.gcd(channels, 8),
        "BR": rows,
        "BC": COLUMNS,
        "num_warps": max(1, min(8, rows * COLUMNS // 1024)),
    }
    return (clients, triton.cdiv(channels, COLUMNS)), sizes
