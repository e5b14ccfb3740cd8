"""Triton kernels for depthwise convolutions of C clients: each channel has its own kernel.

Images are [C * B, H, W, channels], kernels [C, h * w, channels], results [C * B, H', W', channels]:

    out[c, (b, i, j), n] = bias[c, n] + sum over taps (k, l) of
        images[c, b, i * down + k - top, j * right + l - left, n] * kernel[c, (k, l), n]

Matrix units are of no use here: the kernels are bound by memory. A program computes a tile of
positions and channels, over all taps.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedlens.network.kernels.convolution import position_of
from fedlens.network.kernels.launch import launchable
from fedlens.network.kernels.sizes import PROGRAMS, Geometry, result_size
from fedlens.network.stacked.products import Padding

TILE = 2048  # positions times channels of a program


class Taps(NamedTuple):
    """The sizes that kernels are compiled for. Others are arguments: a network has many of them."""

    number: int  # rows times columns of the kernel
    width: int  # columns of the kernel
    down: int  # the stride
    right: int
    top: int  # rows of padding
    left: int  # columns of padding


@launchable
def _depthwise_kernel(
    images, kernel, bias, out, batch, rows, columns, tall, wide, channels,
    taps: tl.constexpr, HAS_BIAS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """out[c, m, n] as above. Program (i, c, j): BM positions of block i, BN channels of block j."""
    client = tl.program_id(1).to(tl.int64)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(2) * BN + tl.arange(0, BN)
    total = batch * rows * columns
    image, row, column = position_of(m, rows, columns)
    row, column = row * taps.down - taps.top, column * taps.right - taps.left
    images += client * batch * tall * wide * channels
    kernel += client * taps.number * channels
    here = n < channels
    sums = tl.zeros((BM, BN), tl.float32)
    if HAS_BIAS:
        b = tl.load(bias + client * channels + n, mask=here, other=0.0)
        sums += b.to(tl.float32)[None, :]
    number: tl.constexpr = taps.number
    for tap in tl.static_range(number):
        r, q = row + tap // taps.width, column + tap % taps.width
        inside = (m < total) & (r >= 0) & (r < tall) & (q >= 0) & (q < wide)
        entry = ((image * tall + r) * wide + q) * channels
        there = inside[:, None] & here[None, :]
        value = tl.load(images + entry[:, None] + n[None, :], mask=there, other=0.0)
        w = tl.load(kernel + tap * channels + n, mask=here, other=0.0)
        sums += value.to(tl.float32) * w.to(tl.float32)[None, :]
    there = (m < total)[:, None] & here[None, :]
    out += client * total * channels
    tl.store(out + m[:, None] * channels + n[None, :], sums.to(out.dtype.element_ty), mask=there)


@launchable
def _image_gradient_kernel(
    grads, kernel, out, batch, rows, columns, tall, wide, channels,
    taps: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """out[c, m, n], the gradient of pixels m, with the blocks of `_depthwise_kernel`.

    For pixel m = (b, r, q), with the sum over all taps (k, l) and positions (i, j) with
    i * down + k - top = r and j * right + l - left = q,

        out[c, m, n] = sum of grads[c, (b, i, j), n] * kernel[c, (k, l), n]
    """
    client = tl.program_id(1).to(tl.int64)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(2) * BN + tl.arange(0, BN)
    total = batch * tall * wide
    image, row, column = position_of(m, tall, wide)
    row, column = row + taps.top, column + taps.left
    grads += client * batch * rows * columns * channels
    kernel += client * taps.number * channels
    here = n < channels
    sums = tl.zeros((BM, BN), tl.float32)
    number: tl.constexpr = taps.number
    for tap in tl.static_range(number):
        r, q = row - tap // taps.width, column - tap % taps.width
        inside = (m < total) & (r >= 0) & (q >= 0) & (r % taps.down == 0) & (q % taps.right == 0)
        r, q = r // taps.down, q // taps.right
        inside &= (r < rows) & (q < columns)
        entry = ((image * rows + r) * columns + q) * channels
        there = inside[:, None] & here[None, :]
        grad = tl.load(grads + entry[:, None] + n[None, :], mask=there, other=0.0)
        w = tl.load(kernel + tap * channels + n, mask=here, other=0.0)
        sums += grad.to(tl.float32) * w.to(tl.float32)[None, :]
    there = (m < total)[:, None] & here[None, :]
    out += client * total * channels
    tl.store(out + m[:, None] * channels + n[None, :], sums.to(out.dtype.element_ty), mask=there)


@launchable
def _kernel_gradient_kernel(
    images, grads, out, clients, splits, batch, rows, columns, tall, wide, channels,
    taps: tl.constexpr, HAS_BIAS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """out[split, c, tap, n], a split's part of the gradient of the kernels.

    With the sum over the split's positions (b, i, j),

        out[split, c, (k, l), n] = sum of
            images[c, b, i * down + k - top, j * right + l - left, n] * grads[c, (b, i, j), n]

    The gradient of a bias, the sum of the grads, is one more tap. Program ((j, tap), c, split)
    computes BN channels of block j at one tap, over the positions of a split, BM at a time.
    """
    client = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    number: tl.constexpr = taps.number + HAS_BIAS
    tap = tl.program_id(0) % number
    n = tl.program_id(0) // number * BN + tl.arange(0, BN)
    total = batch * rows * columns
    images += client * batch * tall * wide * channels
    grads += client * total * channels
    here = (n < channels)[None, :]
    sums = tl.zeros((BM, BN), tl.float32)
    chunks = tl.cdiv(total, BM * splits)
    for chunk in range(chunks):
        m = (split * chunks + chunk) * BM + tl.arange(0, BM)
        there = (m < total)[:, None] & here
        grad = tl.load(grads + m[:, None] * channels + n[None, :], mask=there, other=0.0)
        grad = grad.to(tl.float32)
        if tap < taps.number:
            image, row, column = position_of(m, rows, columns)
            r = row * taps.down - taps.top + tap // taps.width
            q = column * taps.right - taps.left + tap % taps.width
            inside = (m < total) & (r >= 0) & (r < tall) & (q >= 0) & (q < wide)
            entry = ((image * tall + r) * wide + q) * channels
            there = inside[:, None] & here
            value = tl.load(images + entry[:, None] + n[None, :], mask=there, other=0.0)
            grad *= value.to(tl.float32)
        sums += grad
    out += ((split * clients + client) * number + tap) * channels
    tl.store(out + n, tl.sum(sums, 0), mask=n < channels)


def product(
    images: Tensor, kernel: Tensor, bias: Tensor | None, geometry: Geometry, padding: Padding
) -> Tensor:
    """Convolve images [C * B, H, W, channels] with kernels [C, h * w, channels]."""
    rows, columns = result_size(images, geometry, padding)
    out = images.new_empty(len(images), rows, columns, images.shape[3])
    grid, blocks = _blocks(out, len(kernel))
    _depthwise_kernel[grid](
        images, kernel, kernel if bias is None else bias, out, *_sizes(images, out, len(kernel)),
        _taps(geometry, padding), HAS_BIAS=bias is not None, **blocks,
    )  # fmt: skip
    return out


def image_gradient(
    grads: Tensor, images: Tensor, kernel: Tensor, geometry: Geometry, padding: Padding
) -> Tensor:
    """The gradient of the images, from `grads` [C * B, H', W', channels]."""
    out = torch.empty_like(images)
    grid, blocks = _blocks(out, len(kernel))
    _image_gradient_kernel[grid](
        grads, kernel, out, *_sizes(images, grads, len(kernel)), _taps(geometry, padding), **blocks
    )
    return out


def kernel_gradient(
    grads: Tensor, images: Tensor, clients: int, geometry: Geometry, padding: Padding,
    *, has_bias: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The gradients of kernels [C, h * w, channels] and biases [C, channels], in float32."""
    taps = _taps(geometry, padding)
    (positions, _, tiles), blocks = _blocks(grads, clients)
    programs = tiles * (taps.number + has_bias)
    splits = max(1, min(4 * PROGRAMS // (programs * clients), positions // 4))
    shape = splits, clients, taps.number + has_bias, grads.shape[3]
    out = torch.empty(shape, dtype=torch.float32, device=grads.device)
    _kernel_gradient_kernel[(programs, clients, splits)](
        images, grads, out, clients, splits, *_sizes(images, grads, clients), taps,
        HAS_BIAS=has_bias, **blocks,
    )  # fmt: skip
    whole = out[0] if splits == 1 else out.sum(0)
    return whole[:, : taps.number], whole[:, -1] if has_bias else None


def _taps(geometry: Geometry, padding: Padding) -> Taps:
    (height, width), (left, _, top, _) = geometry.size, padding
    return Taps(height * width, width, *geometry.stride, top, left)


def _sizes(images: Tensor, results: Tensor, clients: int) -> tuple[int, ...]:
    """Images of a client, rows and columns of results, rows and columns of images, channels."""
    count, tall, wide, channels = images.shape
    return count // clients, *results.shape[1:3], tall, wide, channels


def _blocks(images: Tensor, clients: int) -> tuple[tuple[int, int, int], dict[str, int]]:
    """The grid of programs (a client's pixels, clients, channels), and their block sizes."""
    channels, pixels = images.shape[3], images[..., 0].numel() // clients
    wide = min(int(triton.next_power_of_2(channels)), 64)
    block = min(int(triton.next_power_of_2(pixels)), TILE // wide)
    sizes = {"BM": block, "BN": wide, "num_warps": 4}
    return (triton.cdiv(pixels, block), clients, triton.cdiv(channels, wide)), sizes
