"""Triton kernels for group normalisation of C clients, then an optional addition and ReLU.

Images are [C * B, pixels, channels]. With the mean and the scale 1 / sqrt(var + eps) of the group
that an element belongs to (`channels // groups` channels of one image),

    normal = (x - mean) * scale
    z = normal * weight[c, channel] + bias[c, channel] + around
    y = z, max(z, 0) for ReLU, or min(max(z, 0), 6) for ReLU6

and from the grads dy, with g = dy where the ReLU passes it, else 0, and n elements in the group,

    dweight = sum of g * normal,   dbias = sum of g,   daround = g
    dx = scale * (weight * g - (sum of weight * g + normal * sum of weight * g * normal) / n)

A program computes some groups of one image. If all of their pixels fit into one tile it reads them
once, else twice: for the sums, and for the result. Statistics are stored per channel.
"""

from __future__ import annotations

import math
from typing import NamedTuple

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

WARP = 1024  # elements of a tile per warp, if a program has several tiles
SIZES = ["batch", "pixels", "channels", "width", "each"]  # not specialised: too many values


class Tile(NamedTuple):
    """How many elements a program holds at a time."""

    whole: int  # at most, if the program has only one tile
    warp: int  # of these, per warp
    part: int  # in each tile, if it has several


FORWARD = Tile(whole=16 * 2048, warp=2048, part=4096)
BACKWARD = Tile(whole=8 * 1024, warp=1024, part=8192)  # x and dy: twice as many registers


@triton.jit
def _channels_of(
    block, channels, width, each, UNIT: tl.constexpr, BC: tl.constexpr, BG: tl.constexpr
):  # fmt: skip
    """The channels of a block, which of them exist, and the group of each as a mask [BC, BG]."""
    n, each = tl.arange(0, BC), each // UNIT * UNIT
    k = block * each + n
    here = (n < each) & (k < channels)
    member = (n // width)[:, None] == tl.arange(0, BG)[None, :]
    return k, here, member & here[:, None]


@triton.jit
def _over_groups(values, member, WIDTH: tl.constexpr):
    """The sum over the group of each channel; `member` [channels, groups] is the mask of groups.

    A nonzero WIDTH, a power of two, is the width of all groups: they are the rows of a matrix.
    """
    if WIDTH:
        rows: tl.constexpr = values.shape[0] // WIDTH
        of_rows = tl.sum(tl.reshape(values, (rows, WIDTH)), 1)
        spread = tl.broadcast_to(of_rows[:, None], (rows, WIDTH))
        return tl.reshape(spread, (values.shape[0],))
    sums = tl.sum(tl.where(member, values[:, None], 0.0), 0)
    return tl.sum(tl.where(member, sums[None, :], 0.0), 1)


@triton.jit
def _tile(begin, start, pixels, k, here, channels, BP: tl.constexpr):
    """The offsets of BP pixels and all channels of a block, and which of them exist."""
    p = begin + tl.arange(0, BP)
    return start + p[:, None] * channels + k[None, :], (p < pixels)[:, None] & here[None, :]


@launchable(do_not_specialize=SIZES)
def _group_norm_kernel(
    x, weight, bias, around, y, means, scales, batch, pixels, eps, channels, width, each,
    f: tl.constexpr, UNIT: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr, BG: tl.constexpr,
    WIDTH: tl.constexpr, ONE: tl.constexpr,
):  # fmt: skip
    """y as above, and means and scales [C * B, channels].

    Program (i, j) computes block j of `each` channels of image i: whole groups of `width` channels.
    """
    image = tl.program_id(0).to(tl.int64)
    channels = channels // UNIT * UNIT  # tells the compiler that UNIT divides it
    k, here, member = _channels_of(tl.program_id(1), channels, width, each, UNIT, BC, BG)
    start = image * pixels * channels
    # Sums are of differences to the first pixel: a large mean would lose precision.
    first = tl.load(x + start + k, mask=here, other=0.0).to(tl.float32)
    if ONE:
        entry, there = _tile(0, start, pixels, k, here, channels, BP)
        value = tl.load(x + entry, mask=there, other=0.0).to(tl.float32)
        centred = tl.where(there, value - first[None, :], 0.0)
        mean, square = tl.sum(centred, 0) / pixels, tl.sum(centred * centred, 0)
    else:
        sums = tl.zeros((BP, BC), tl.float32)
        squares = tl.zeros((BP, BC), tl.float32)
        for begin in range(0, pixels, BP):
            entry, there = _tile(begin, start, pixels, k, here, channels, BP)
            value = tl.load(x + entry, mask=there, other=0.0).to(tl.float32)
            centred = tl.where(there, value - first[None, :], 0.0)
            sums += centred
            squares += centred * centred
        mean, square = tl.sum(sums, 0) / pixels, tl.sum(squares, 0)
    spread = square - mean * mean * pixels  # about the mean of the channel
    mean += first
    of_group = _over_groups(mean, member, WIDTH) / width
    centred = tl.where(here, mean - of_group, 0.0)
    var = _over_groups(spread + centred * centred * pixels, member, WIDTH) / (width * pixels)
    scale = 1 / tl.sqrt(tl.maximum(var, 0.0) + eps)
    tl.store(means + image * channels + k, of_group, mask=here)
    tl.store(scales + image * channels + k, scale, mask=here)
    w, b = affine(weight, bias, image // batch * channels + k, here, f)
    if ONE:
        entry, there = _tile(0, start, pixels, k, here, channels, BP)
        normal = (value - of_group[None, :]) * scale[None, :]
        z = before_relu(normal, w, b, around, entry, there, f)
        tl.store(y + entry, through_relu(z, f).to(y.dtype.element_ty), mask=there)
    else:
        for begin in range(0, pixels, BP):
            entry, there = _tile(begin, start, pixels, k, here, channels, BP)
            value = tl.load(x + entry, mask=there, other=0.0).to(tl.float32)
            normal = (value - of_group[None, :]) * scale[None, :]
            z = before_relu(normal, w, b, around, entry, there, f)
            tl.store(y + entry, through_relu(z, f).to(y.dtype.element_ty), mask=there)


@triton.jit
def _normal_and_grad(dy, x, around, mean, scale, w, b, entry, there, f: tl.constexpr):
    """`normal` of a tile, and g, the grads before the ReLU."""
    value = tl.load(x + entry, mask=there, other=0.0).to(tl.float32)
    normal = (value - mean[None, :]) * scale[None, :]
    grad = tl.load(dy + entry, mask=there, other=0.0).to(tl.float32)
    z = before_relu(normal, w, b, around, entry, there, f)
    return normal, back_through_relu(grad, z, f)


@triton.jit
def _store_grads(
    normal, grad, level, along, scale, w, dx, daround, entry, there, f: tl.constexpr
):  # fmt: skip
    """dx = scale * (weight * g - level - normal * along), and daround = g, of a tile."""
    if f.around and f.relu:
        tl.store(daround + entry, grad.to(daround.dtype.element_ty), mask=there)
    grad = (grad * w[None, :] - level[None, :] - normal * along[None, :]) * scale[None, :]
    tl.store(dx + entry, grad.to(dx.dtype.element_ty), mask=there)


@launchable(do_not_specialize=SIZES)
def _group_norm_gradient_kernel(
    dy, x, weight, bias, around, means, scales, dx, daround, dweight, dbias, batch, pixels,
    channels, width, each,
    f: tl.constexpr, UNIT: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr, BG: tl.constexpr,
    WIDTH: tl.constexpr, ONE: tl.constexpr,
):  # fmt: skip
    """dx, daround, and each image's part of dweight and dbias [C * B, channels], as above.

    Programs have the same blocks as in `_group_norm_kernel`.
    """
    image = tl.program_id(0).to(tl.int64)
    channels = channels // UNIT * UNIT  # tells the compiler that UNIT divides it
    k, here, member = _channels_of(tl.program_id(1), channels, width, each, UNIT, BC, BG)
    start = image * pixels * channels
    mean = tl.load(means + image * channels + k, mask=here, other=0.0)
    scale = tl.load(scales + image * channels + k, mask=here, other=0.0)
    w, b = affine(weight, bias, image // batch * channels + k, here, f)
    if ONE:
        entry, there = _tile(0, start, pixels, k, here, channels, BP)
        normal, grad = _normal_and_grad(dy, x, around, mean, scale, w, b, entry, there, f)
        product, total = tl.sum(grad * normal, 0), tl.sum(grad, 0)
    else:
        products = tl.zeros((BP, BC), tl.float32)
        sums = tl.zeros((BP, BC), tl.float32)
        for begin in range(0, pixels, BP):
            entry, there = _tile(begin, start, pixels, k, here, channels, BP)
            normal, grad = _normal_and_grad(dy, x, around, mean, scale, w, b, entry, there, f)
            products += grad * normal
            sums += grad
        product, total = tl.sum(products, 0), tl.sum(sums, 0)
    tl.store(dweight + image * channels + k, product, mask=here)
    tl.store(dbias + image * channels + k, total, mask=here)
    along = _over_groups(product * w, member, WIDTH) / (width * pixels)
    level = _over_groups(total * w, member, WIDTH) / (width * pixels)
    if ONE:
        entry, there = _tile(0, start, pixels, k, here, channels, BP)
        _store_grads(normal, grad, level, along, scale, w, dx, daround, entry, there, f)
    else:
        for begin in range(0, pixels, BP):
            entry, there = _tile(begin, start, pixels, k, here, channels, BP)
            normal, grad = _normal_and_grad(dy, x, around, mean, scale, w, b, entry, there, f)
            _store_grads(normal, grad, level, along, scale, w, dx, daround, entry, there, f)


def group_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, around: Tensor | None,
    clients: int, groups: int, eps: float, follows: Follows,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """y of images [C * B, H, W, channels], and statistics [2, C * B, channels]."""
    y, stats = torch.empty_like(x), _of_images(x)
    grid, sizes = _blocks(x, groups, FORWARD)
    _group_norm_kernel[grid](
        x, *or_any(x, weight, bias, around), y, *stats, len(x) // clients, x[0, ..., 0].numel(),
        eps, **sizes, f=follows,
    )  # fmt: skip
    return y, stats


def group_norm_gradient(
    dy: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, around: Tensor | None,
    stats: Tensor, clients: int, groups: int, follows: Follows,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dx, daround, and the gradients [2, C, channels] of weight and bias, in float32.

    If no ReLU follows, daround is dy itself.
    """
    dx, parts = torch.empty_like(x), _of_images(x)
    daround = torch.empty_like(x) if follows.around and follows.relu else dy
    grid, sizes = _blocks(x, groups, BACKWARD)
    _group_norm_gradient_kernel[grid](
        dy, x, *or_any(x, weight, bias, around), *stats, dx, daround, *parts, len(x) // clients,
        x[0, ..., 0].numel(), **sizes, f=follows,
    )  # fmt: skip
    return dx, daround, parts.view(2, clients, -1, x.shape[-1]).sum(2)


def _of_images(x: Tensor) -> Tensor:
    return torch.empty(2, len(x), x.shape[-1], dtype=torch.float32, device=x.device)


def _blocks(x: Tensor, groups: int, tile: Tile) -> tuple[tuple[int, int], dict[str, int]]:
    """The grid of programs, and their block sizes: whole groups, a tile of pixels and channels."""
    channels, pixels = x.shape[-1], x[0, ..., 0].numel()
    width, whole = channels // groups, int(triton.next_power_of_2(pixels))
    aligned = 8 // math.gcd(width, 8)  # wide loads stay aligned in multiples of this many groups
    fitting = (32 if whole >= 64 else 64) // width
    each = width * min(groups, max(fitting // aligned, 1) * aligned)
    columns = max(16, int(triton.next_power_of_2(each)))
    one = columns * whole <= tile.whole
    rows = whole if one else max(1, tile.part // columns)
    sizes = {
        "channels": channels,
        "width": width,
        "each": each,
        "UNIT": math.gcd(channels, each, 8),
        "BP": rows,
        "BC": columns,
        "BG": int(triton.next_power_of_2(each // width)),
        "WIDTH": width if columns % width == 0 and width & (width - 1) == 0 else 0,
        "ONE": one,
        "num_warps": max(1, min(16, columns * rows // (tile.warp if one else WARP))),
    }
    return (len(x), triton.cdiv(channels, each)), sizes
