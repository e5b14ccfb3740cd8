"""Products of many clients at once, each with its own weights, by PyTorch's operations alone.

cuDNN runs a grouped convolution group by group, so that its time grows with the number of clients.
Here it is one batched product of the patches of the images with the kernels,

    y[c, (b, i, j), o] = sum over (k, l, n) of
        x[c, b, i * down + k - top, j * right + l - left, n] * w[c, o, n, k, l] + bias[c, o],

and so is the gradient of the images, with the kernels rotated by 180 degrees. Weights may have a
wider dtype than the images: they are multiplied in the dtype of the images. Their gradients have
the dtype and memory layout of the weights, so that a solver can update both as flat memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Factors(NamedTuple):
    """Each client's matrix as w = start - lr * grads' inputs (see engines/factored.py).

    Clients form G groups of equal size, and each group has one start. `lr` and `log_decay` are per
    group or per client. Each later step multiplies a row's part by 2 ** log_decay, and adds
    -lr * drift.
    """

    start: Tensor  # [G, out, features]
    inputs: Tensor  # [C, T * B, features] of the steps so far; zeros for later steps
    grads: Tensor  # [C, T * B, out] of the layer's outputs
    step: Tensor  # [] int64: steps taken so far by every client that still trains
    batch: int  # rows of inputs and grads per step
    lr: Tensor  # [G] or [C]
    log_decay: Tensor  # [G] or [C]
    drift: Tensor | None = None  # [C, out, features]
    times: Tensor | None = None  # [G or C, T + 1] factor of the drift in w, by steps taken
    by_pixel: bool = False  # whether features are images flattened pixel by pixel


Padding = tuple[int, int, int, int]  # left, right, top, bottom


Note = Callable[[Tensor, Tensor | None], None]
Tap = tuple[Tensor, Note]
"""A tensor that requires a gradient, and what is called in the backward pass of a convolution with
the gradients of every image, [N, h, w, channels, out] and [N, out]."""


def apply(function: Any, *given: Any) -> Tensor:
    """`function.apply(*given)` of a `torch.autograd.Function`, with the type of its result."""
    result: Tensor = function.apply(*given)
    return result


def grouped_convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    padding: Padding,
    stride: tuple[int, int],
    dilation: tuple[int, int],
    groups: int,
) -> Tensor:
    """Any convolution of images [C * B, channels, H, W]: each client is a group of channels."""
    clients, weight = len(weight), weight.to(x.dtype)
    images = x.view(clients, -1, *x.shape[1:]).transpose(0, 1).flatten(1, 2)
    flat = None if bias is None else bias.to(x.dtype).flatten()
    geometry: Any = stride, 0, dilation, clients * groups
    y = F.conv2d(F.pad(images, padding), weight.flatten(0, 1), flat, *geometry)
    y = y.view(len(y), clients, -1, *y.shape[2:]).transpose(0, 1).flatten(0, 1)
    return y.contiguous(memory_format=torch.channels_last)


def group_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, clients: int, groups: int, eps: float
) -> Tensor:
    """Group norm of images [C * B, channels, H, W], with weights and biases [C, channels]."""
    y = F.group_norm(x, groups, eps=eps)
    if weight is not None and bias is not None:
        scale, shift = (t.to(x.dtype)[:, None, :, None, None] for t in (weight, bias))
        y = (y.view(clients, -1, *y.shape[1:]) * scale + shift).flatten(0, 1)
    return y.contiguous(memory_format=torch.channels_last)


def shared_product(x: Tensor, matrices: Tensor) -> Tensor:
    """Multiply rows [C, B, n] by matrices [G, n, m], each shared by C / G clients."""
    if len(matrices) == 1:
        return (x.flatten(0, 1) @ matrices[0]).view(*x.shape[:2], -1)
    return torch.bmm(x.reshape(len(matrices), -1, x.shape[2]), matrices).view(*x.shape[:2], -1)


def dilate(grads: Tensor, size: tuple[int, int], stride: tuple[int, int]) -> Tensor:
    """Grads [N, H', W', out] of a strided convolution, spread to those without stride, of `size`.

    out[n, i * down, j * right] = grads[n, i, j], and 0 elsewhere.
    """
    count, rows, columns, out = grads.shape
    (down, right), dense = stride, grads.new_zeros(count, *size, out)
    dense[:, : rows * down : down, : columns * right : right] = grads
    return dense


def strided_pixels(x: Tensor, stride: tuple[int, int]) -> Tensor:
    """Images [N, channels, H, W] as [N, H', W', channels]: the pixels at multiples of `stride`."""
    if stride == (1, 1):
        return x.permute(0, 2, 3, 1)
    return apply(StridedPixels, x, stride)


def faded(rows: Tensor, batch: int, steps: Tensor, log_decay: Tensor) -> Tensor:  # [C, T * B]
    """2 ** (log_decay * steps after a row's own), for rows [C, T * B, ...]; log_decay is [C]."""
    step = torch.arange(rows.shape[1], device=rows.device) // batch
    later = (steps[:, None] - 1 - step).clamp(min=0)
    return torch.exp2(log_decay.double()[:, None] * later)


def drifted(steps: Tensor, lr: Tensor, decay: Tensor) -> Tensor:  # [T], [C], [C] -> [C, T]
    """The drift's factor in the weights after steps: -lr * (1 + decay + decay^2 ...)."""
    many, lr, decay = steps.double()[None], lr.double()[:, None], decay.double()[:, None]
    series = (1 - decay**many) / torch.where(decay == 1, 1, 1 - decay)
    return -lr * torch.where(decay == 1, many, series)


class StridedPixels(torch.autograd.Function):
    """The gradient is stored channels last, like that of the parallel branch it is added to."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, stride: tuple[int, int]) -> Tensor:
        down, right = ctx.stride = stride
        ctx.size = x.shape[2:]
        return x.permute(0, 2, 3, 1)[:, ::down, ::right].contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return dilate(grads[0], ctx.size, ctx.stride).permute(0, 3, 1, 2), None


class FactoredLinear(torch.autograd.Function):
    """y = x w' + bias for the matrix w of `factors`, without computing w.

    With inputs X, grads D, and weights[k] = -lr * 2 ** (log_decay * steps since row k),

        y = x start' + (weights * (x X')) D + times * (x drift') + bias
        dx = dy start + (weights * (dy D')) X + times * (dy drift)

    The forward pass writes x to the step's rows of X, the backward pass writes dy to those of D.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, factors: Factors, relu: bool) -> Tensor:
        inputs, seen_grads, step, each = factors[1:5]
        lr, log_decay = (
            one.repeat_interleave(len(x) // len(one)) for one in (factors.lr, factors.log_decay)
        )
        taken = step.expand(len(x))
        weights = (-lr[:, None] * faded(inputs, each, taken, log_decay)).to(x)[:, None]
        y = shared_product(x, factors.start.mT)
        times = None
        if factors.drift is not None and factors.times is not None:
            each_client = factors.times.repeat_interleave(len(x) // len(factors.lr), 0)
            times = each_client.gather(1, taken[:, None]).to(x)[:, :, None]
            y += torch.bmm(x, factors.drift.mT) * times
        y = torch.baddbmm(y, torch.bmm(x, inputs.mT) * weights, seen_grads)
        if bias is not None:
            y += bias[:, None]
        if relu:
            y.relu_()
        rows = step * each + torch.arange(x.shape[1], device=x.device)
        inputs.index_copy_(1, rows, x)
        ctx.save_for_backward(y if relu else None, rows, weights, times)
        ctx.factors, ctx.has_bias = factors, bias is not None
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dy,) = grads
        y, rows, weights, times = ctx.saved_tensors
        start, inputs, seen_grads = ctx.factors[:3]
        if y is not None:
            dy = torch.ops.aten.threshold_backward(dy, y, 0)
        dx = None
        if ctx.needs_input_grad[0]:
            # This step's grads are still zeros, so its own inputs contribute nothing.
            past = torch.bmm(dy, seen_grads.mT) * weights
            dx = torch.baddbmm(shared_product(dy, start), past, inputs)
            if times is not None:
                dx += torch.bmm(dy, ctx.factors.drift) * times
        seen_grads.index_copy_(1, rows, dy)
        return (
            dx,
            dy.sum(1, dtype=torch.promote_types(dy.dtype, torch.float32)) if ctx.has_bias else None,
            None,
            None,
        )


class Linear(torch.autograd.Function):
    """y[c] = x[c] w[c]' + bias[c], with an optional ReLU."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, relu: bool) -> Tensor:
        cast = weight.to(x.dtype)
        if bias is None:
            y = torch.bmm(x, cast.mT)
        else:
            y = torch.baddbmm(bias.to(x.dtype)[:, None], x, cast.mT)
        if relu:
            y.relu_()
        ctx.save_for_backward(x, cast, y if relu else None)
        ctx.dtype, ctx.has_bias = weight.dtype, bias is not None
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dy,) = grads
        x, weight, y = ctx.saved_tensors
        if y is not None:
            dy = torch.ops.aten.threshold_backward(dy, y, 0)
        dx = torch.bmm(dy, weight) if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:
            return dx, None, None, None
        db = dy.sum(1, dtype=ctx.dtype) if ctx.has_bias else None
        if weight.stride(2) > weight.stride(1):  # 1 x 1 kernels, stored with `out` last
            return dx, wide_product(x.mT, dy, ctx.dtype).mT, db, None
        return dx, wide_product(dy.mT, x, ctx.dtype), db, None


def wide_product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """A batched product with a result of a wider dtype, which a GPU computes directly."""
    if a.dtype is dtype or a.dtype is torch.float64:
        return torch.bmm(a, b)
    return torch.bmm(a, b, out_dtype=dtype) if a.is_cuda else torch.bmm(a, b).to(dtype)


class Convolve(torch.autograd.Function):
    """The convolution as a product of patches and kernels, with stride and padding."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        padding: Padding,
        stride: tuple[int, int],
    ) -> Tensor:
        kernel = weight.to(x.dtype).permute(0, 3, 4, 2, 1).flatten(1, 3)  # [C, h*w*channels, out]
        ctx.save_for_backward(x, weight)
        ctx.padding, ctx.stride, ctx.has_bias = padding, stride, bias is not None
        bias = None if bias is None else bias.to(x.dtype)
        return _product(x, kernel, bias, weight.shape[3:], padding, stride)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dy,) = grads
        x, weight = ctx.saved_tensors
        clients, out, channels, height, width = weight.shape
        dw = db = dx = None
        if ctx.needs_input_grad[1]:
            rows = dy.permute(0, 2, 3, 1).reshape(clients, -1, out)
            patches = _patches(padded(x, ctx.padding), clients, weight.shape[3:], ctx.stride)
            dw = torch.bmm(patches.mT, rows).to(weight.dtype)
            dw = dw.view(clients, height, width, channels, out).permute(0, 4, 3, 1, 2)
            db = rows.sum(1, dtype=weight.dtype) if ctx.has_bias else None
        if ctx.needs_input_grad[0]:
            left, right, top, bottom = ctx.padding
            around = width - 1 - left, width - 1 - right, height - 1 - top, height - 1 - bottom
            if ctx.stride != (1, 1):
                _, _, tall, wide = x.shape
                dense = tall + top + bottom - height + 1, wide + left + right - width + 1
                dy = dilate(dy.permute(0, 2, 3, 1), dense, ctx.stride).permute(0, 3, 1, 2)
            turned = weight.to(x.dtype).flip(3, 4).permute(0, 3, 4, 1, 2).flatten(1, 3)
            dx = _product(dy, turned, None, weight.shape[3:], around, (1, 1))
        return dx, dw, db, None, None


def _product(
    x: Tensor,
    kernel: Tensor,
    bias: Tensor | None,
    size: torch.Size,
    padding: Padding,
    stride: tuple[int, int],
) -> Tensor:
    """The patches of `x` times kernels [C, h * w * channels, out], as images channels last."""
    images = padded(x, padding)
    count, tall, wide, _ = images.shape
    rows, columns = (tall - size[0]) // stride[0] + 1, (wide - size[1]) // stride[1] + 1
    patches = _patches(images, len(kernel), size, stride)
    y = (
        torch.bmm(patches, kernel)
        if bias is None
        else torch.baddbmm(bias[:, None], patches, kernel)
    )
    return y.view(count, rows, columns, -1).permute(0, 3, 1, 2)


def padded(x: Tensor, padding: Padding) -> Tensor:  # [N, H, W, channels]
    images = x.permute(0, 2, 3, 1)
    return (F.pad(images, (0, 0, *padding)) if any(padding) else images).contiguous()


def _patches(images: Tensor, clients: int, size: torch.Size, stride: tuple[int, int]) -> Tensor:
    """The pixels under a kernel at each output position: [C, B * H' * W', h * w * channels]."""
    count, tall, wide, channels = images.shape
    height, width = size
    down, right = stride
    # A row of a patch is contiguous in memory: w pixels of all channels.
    shape = ((tall - height) // down + 1, (wide - width) // right + 1, height, width * channels)
    row = wide * channels
    strides = (tall * row, down * row, right * channels, row, 1)
    return images.as_strided((count, *shape), strides).reshape(
        clients, -1, height * width * channels
    )
