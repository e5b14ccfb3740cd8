"""Convolutions (of stride 1) and linear layers of many clients at once, each with its own weights.

cuDNN runs a grouped convolution group by group, so that the time goes with the clients. Here it
is one batched product of the patches of the images with the kernels. On a GPU in bfloat16 the
patches are never written down (`kernels.py`); elsewhere they are, which is the reference. The
gradient of the images is the same kind of product, with the kernels turned around. Gradients of
weights come in the layout of the weights: the solver then runs over both from end to end.
"""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Padding = tuple[int, int, int, int]  # left, right, top, bottom


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, padding: Padding) -> Tensor:
    """Images [C * B, channels, H, W] under each client's kernels [C, out, channels, h, w]."""
    y: Tensor = _Convolve.apply(x, weight, bias, padding)  # type: ignore[no-untyped-call]
    return y


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Rows [C, B, features] under each client's matrix [C, out, features]."""
    y: Tensor = _Linear.apply(x, weight, bias)  # type: ignore[no-untyped-call]
    return y


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        if bias is None:
            return torch.bmm(x, weight.mT)
        return torch.baddbmm(bias[:, None], x, weight.mT)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (dy,) = gradients
        x, weight = ctx.saved_tensors
        dx = torch.bmm(dy, weight) if ctx.needs_input_grad[0] else None
        return dx, torch.bmm(dy.mT, x), dy.sum(1) if ctx.has_bias else None


class _Convolve(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, padding: Padding
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.padding, ctx.has_bias = padding, bias is not None
        kernel = weight.permute(0, 3, 4, 2, 1).flatten(1, 3)  # [C, h * w * channels, out]
        return _product(x, kernel, bias, weight.shape[3:], padding)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (dy,) = gradients
        x, weight = ctx.saved_tensors
        clients, out, channels, height, width = weight.shape
        rows = dy.permute(0, 2, 3, 1).reshape(clients, -1, out)
        dw = _kernel_gradient(x, rows, weight.shape[3:], ctx.padding)
        dw = dw.view(clients, height, width, channels, out).permute(0, 4, 3, 1, 2).contiguous()
        db = rows.sum(1) if ctx.has_bias else None
        dx = None
        if ctx.needs_input_grad[0]:
            left, right, top, bottom = ctx.padding
            around = width - 1 - left, width - 1 - right, height - 1 - top, height - 1 - bottom
            turned = (
                weight.flip(3, 4).permute(0, 3, 4, 1, 2).flatten(1, 3)
            )  # [C, h*w*out, channels]
            dx = _product(dy, turned, None, weight.shape[3:], around)
        return dx, dw, db, None


def _product(
    x: Tensor, kernel: Tensor, bias: Tensor | None, size: torch.Size, padding: Padding
) -> Tensor:
    """The patches of `x` times kernels [C, h * w * channels, out], as images that lie so."""
    images = _padded(x, padding)
    count, tall, wide, _ = images.shape
    rows, columns = tall - size[0] + 1, wide - size[1] + 1
    if _in_registers(x):
        from fedlens import kernels

        y = kernels.product(images, kernel.contiguous(), bias, (size[0], size[1]))
    elif bias is None:
        y = torch.bmm(_patches(images, len(kernel), size), kernel)
    else:
        y = torch.baddbmm(bias[:, None], _patches(images, len(kernel), size), kernel)
    return y.view(count, rows, columns, -1).permute(0, 3, 1, 2)


def _kernel_gradient(x: Tensor, rows: Tensor, size: torch.Size, padding: Padding) -> Tensor:
    """Patches times the gradient [C, B * H * W, out] of their product: [C, h*w*channels, out]."""
    images = _padded(x, padding)
    if _in_registers(x):
        from fedlens import kernels

        return kernels.kernel_gradient(images, rows, (size[0], size[1])).to(x.dtype)
    return torch.bmm(_patches(images, len(rows), size).mT, rows)


def _padded(x: Tensor, padding: Padding) -> Tensor:  # [N, H, W, channels]
    images = x.permute(0, 2, 3, 1)
    return (F.pad(images, (0, 0, *padding)) if any(padding) else images).contiguous()


def _patches(images: Tensor, clients: int, size: torch.Size) -> Tensor:
    """What a kernel sees at each place: [C, B * H' * W', h * w * channels]."""
    count, tall, wide, channels = images.shape
    height, width = size
    # A row of a patch is one run in memory: w pixels of all channels.
    shape = (count, tall - height + 1, wide - width + 1, height, width * channels)
    strides = (tall * wide * channels, wide * channels, channels, wide * channels, 1)
    return images.as_strided(shape, strides).reshape(clients, -1, height * width * channels)


def _in_registers(x: Tensor) -> bool:
    return x.is_cuda and x.dtype is torch.bfloat16 and _has_triton()


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
