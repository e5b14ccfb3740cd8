"""Layers of many clients whose steps are fused on a GPU: Triton kernels with their gradients.

Each has a plain form elsewhere, which is used on a CPU and in other dtypes, and which tests
compare it with.
"""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fedlens.core import Number
from fedlens.network.factors import Factors
from fedlens.network.kernels.sizes import Padding

ROWS = 128  # of a batch, that the kernels of factored layers hold at once


def has_kernels(x: Tensor) -> bool:
    """Whether Triton kernels can work on `x`: on a GPU, in anything but float64."""
    return x.is_cuda and x.dtype is not torch.float64 and _has_triton()


def convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    padding: Padding,
    stride: tuple[int, int],
    *,
    relu: bool,
    pool: bool,
) -> Tensor:
    """`products.convolve` with what follows it; float32 weights get float32 gradients."""
    geometry = (tuple(weight.shape[3:]), stride, relu, pool)
    y: Tensor = _Convolve.apply(x, weight, bias, padding, geometry)  # type: ignore[no-untyped-call]
    return y


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, *, relu: bool) -> Tensor:
    """`products.linear` where the matrix `is_small`; the gradients come as it is kept."""
    y: Tensor = _Linear.apply(x, weight, bias, relu)  # type: ignore[no-untyped-call]
    return y


def is_small(x: Tensor, weight: Tensor) -> bool:
    from fedlens.network.kernels import linear as linear_kernels

    return linear_kernels.is_small(x, weight)


def add(to: list[Tensor], what: list[Tensor], times: Number) -> bool:
    """to += times * what, in place, if there is one kernel for that."""
    from fedlens.network.kernels import elementwise as row_kernels

    return row_kernels.add(to, what, times)


def contract(
    to: list[Tensor],
    slopes: list[Tensor],
    server: list[Tensor],
    drift: list[Tensor],
    lr: float,
    keep: float,
) -> bool:
    """`pieces.solve.contract` in place, if there is one kernel for that."""
    from fedlens.network.kernels import elementwise as row_kernels

    return row_kernels.contract(to, slopes, server, drift, lr, keep)


def dropout(
    x: Tensor, keys: Tensor, word: int, num_dropped: int, *, whole_channels: bool
) -> Tensor:
    """`layers.keyed_dropout` for images [C * B, ...] that lie channels last, or rows [C, B, n]."""
    y: Tensor = _Dropout.apply(x, keys, word, num_dropped, whole_channels)  # type: ignore[no-untyped-call]
    return y


def cross_entropy(logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """The weighted mean loss [C] of logits [C, B, L]."""
    loss: Tensor = _CrossEntropy.apply(logits, labels, weights)  # type: ignore[no-untyped-call]
    return loss


class _Convolve(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, padding: Padding, geometry: Any
    ) -> Tensor:
        from fedlens.network.kernels import convolution as kernels

        geometry, sides = kernels.Geometry(*geometry), padding
        # Where weights lie as [C, h, w, channels, out], this is a cast and no transposition.
        kernel = weight.permute(0, 3, 4, 2, 1).to(x.dtype).contiguous()
        images = x.permute(0, 2, 3, 1).contiguous()
        more = kernels.spare_channels(geometry.size, images.shape[3])
        if not kernels.by_taps(images.shape[3]):
            images, padding = _bordered(images, padding, images.shape[3] + more), kernels.NONE
        kernel = (F.pad(kernel, (0, 0, 0, more)) if more else kernel).flatten(1, 3)
        bias = None if bias is None else bias.contiguous()
        y, winners = kernels.product(images, kernel, bias, geometry, padding)
        kept = winners if geometry.pool else y if geometry.relu else None
        ctx.save_for_backward(images, kernel, kept)
        ctx.padding, ctx.geometry, ctx.has_bias = padding, geometry, bias is not None
        ctx.sides, ctx.more = sides, more
        return y.permute(0, 3, 1, 2)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        from fedlens.network.kernels import convolution as kernels
        from fedlens.network.kernels import convolution_gradient as gradient_kernels

        images, kernel, kept = ctx.saved_tensors
        geometry, padding, (left, right, top, bottom) = ctx.geometry, ctx.padding, ctx.sides
        (height, width), clients, channels = geometry.size, len(kernel), images.shape[3]
        around = width - 1 - left, width - 1 - right, height - 1 - top, height - 1 - bottom
        slopes = gradients[0].permute(0, 2, 3, 1).contiguous()
        shape = kernels.places(images, geometry, padding)
        plain, needs_dx = geometry.stride == (1, 1), ctx.needs_input_grad[0]
        shifted = gradient_kernels.by_shifts(channels, geometry, padding)
        by_taps = kernels.by_taps(slopes.shape[3])
        # Spread once, with the border that the gradients need.
        wanted = shifted or (plain and needs_dx and not by_taps)
        border = around if wanted and min(around) >= 0 else kernels.NONE
        if any(border) or kept is not None:
            slopes = kernels.spread(slopes, kept, shape, border, geometry)
        if shifted:
            dw, db = gradient_kernels.shifted_gradient(
                images, slopes, border[2::-2], clients, geometry, padding
            )
        else:
            whole = _bordered(images, padding, channels)
            dw, db = gradient_kernels.kernel_gradient(
                whole, slopes, border[2::-2], clients, geometry
            )
        dw = dw.view(clients, height, width, channels, -1)[:, :, :, : channels - ctx.more]
        dw = dw.contiguous().permute(0, 4, 3, 1, 2)
        dx = None
        if needs_dx:
            if not plain:
                dense = kernels.places(images, kernels.Geometry(geometry.size), padding)
                slopes = apart(slopes, dense, geometry.stride)
            if border == kernels.NONE and not by_taps:
                slopes, border = _bordered(slopes, around, slopes.shape[3]), around
            missing = around if border == kernels.NONE else kernels.NONE
            dx = kernels.turned_product(slopes, kernel, geometry.size, channels, missing)
            dx = dx[..., : channels - ctx.more].permute(0, 3, 1, 2)
        return dx, dw, db if ctx.has_bias else None, None, None


def _bordered(images: Tensor, padding: Padding, room: int) -> Tensor:
    """Images [N, H, W, channels] within their padding, and with so many channels."""
    from fedlens.network.kernels import convolution as kernels

    if not any(padding) and room == images.shape[3]:
        return images
    _, tall, wide, _ = images.shape
    return kernels.spread(images, None, (tall, wide), padding, kernels.PLAIN, room)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, relu: bool) -> Tensor:
        from fedlens.network.kernels import linear as linear_kernels

        x, weight = x.contiguous(), weight.contiguous()
        bias = None if bias is None else bias.contiguous()
        y = linear_kernels.forward(x, weight, bias, relu=relu)
        ctx.save_for_backward(y if relu else None, x, weight)
        ctx.has_bias = bias is not None
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        from fedlens.network.kernels import linear as linear_kernels

        needs_dx, dy = ctx.needs_input_grad[0], gradients[0].contiguous()
        dx, dw, db = linear_kernels.backward(dy, *ctx.saved_tensors, needs_dx=needs_dx)
        return dx, dw, db if ctx.has_bias else None, None


def apart(slopes: Tensor, shape: tuple[int, int], stride: tuple[int, int]) -> Tensor:
    """Slopes [N, H', W', out] of a convolution at the places of one without stride, else 0."""
    count, rows, columns, out = slopes.shape
    (down, right), spread = stride, slopes.new_zeros(count, *shape, out)
    spread[:, : rows * down : down, : columns * right : right] = slopes
    return spread


def shared_product(x: Tensor, matrices: Tensor) -> Tensor:
    """Rows [C, B, n] under matrices [G, n, m], each of which is that of C / G clients."""
    if len(matrices) == 1:
        return (x.flatten(0, 1) @ matrices[0]).view(*x.shape[:2], -1)
    return torch.bmm(x.reshape(len(matrices), -1, x.shape[2]), matrices).view(*x.shape[:2], -1)


class Factored(torch.autograd.Function):
    """`products.Factors.linear`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, factors: Factors, relu: bool) -> Tensor:
        from fedlens.network.kernels import factored as factor_kernels

        x, bias = x.contiguous(), None if bias is None else bias.contiguous()
        base = shared_product(x, factors.start.mT)
        drift = None if factors.drift is None else torch.bmm(x, factors.drift.mT)
        y = factor_kernels.forward(x, base, drift, factors, bias, relu=relu)
        ctx.save_for_backward(y if relu else None)
        ctx.factors, ctx.has_bias = factors, bias is not None
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        from fedlens.network.kernels import factored as factor_kernels

        (y,), factors = ctx.saved_tensors, ctx.factors
        d, weights, db = factor_kernels.slopes_back(gradients[0].contiguous(), y, factors)
        dx = None
        if ctx.needs_input_grad[0]:
            base = shared_product(d, factors.start)
            drift = None if factors.drift is None else torch.bmm(d, factors.drift)
            dx = factor_kernels.backward(base, drift, weights, factors)
        return dx, db if ctx.has_bias else None, None, None


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, keys: Tensor, word: int, num_dropped: int, whole_channels: bool
    ) -> Tensor:
        ctx.save_for_backward(keys)
        ctx.settings = word, num_dropped, whole_channels
        return _dropped(x, keys, word, num_dropped, whole_channels)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (keys,) = ctx.saved_tensors
        return _dropped(gradients[0], keys, *ctx.settings), None, None, None, None


def _dropped(x: Tensor, keys: Tensor, word: int, num_dropped: int, whole: bool) -> Tensor:
    from fedlens.network.kernels import elementwise as row_kernels

    last = torch.channels_last if x.ndim == 4 else torch.contiguous_format
    x = x.contiguous(memory_format=last)
    return row_kernels.dropout(x, keys.contiguous(), word, num_dropped, whole_channels=whole)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
        from fedlens.network.kernels import elementwise as row_kernels

        inputs = logits.contiguous(), labels.contiguous(), weights.contiguous()
        loss, slopes = row_kernels.cross_entropy(*inputs)
        ctx.save_for_backward(slopes)
        return loss

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (slopes,) = ctx.saved_tensors
        return slopes * gradients[0][:, None, None], None, None


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
