"""The Triton forms of operations, with their gradients. `network/ops.py` decides when they run.

Each computes the same as its plain form, and tests compare both. The plain forms of convolve,
linear and factored_linear are in `stacked/products.py`, the others in `network/ops.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedlens.core.keys import GOLDEN, signed
from fedlens.network.kernels import (
    borders,
    convolution,
    convolution_gradient,
    depthwise,
    elementwise,
    factored,
    pooled,
)
from fedlens.network.kernels import dropout as by_key
from fedlens.network.kernels import linear as small_linear
from fedlens.network.kernels.sizes import (
    NO_PADDING,
    Drops,
    Geometry,
    by_taps,
    result_size,
    spare_channels,
)
from fedlens.network.pool import Windows
from fedlens.network.stacked.epilogue import KeyedMask
from fedlens.network.stacked.products import (
    Factors,
    Note,
    Padding,
    Tap,
    apply,
    dilate,
    shared_product,
)

UNSTORED = (torch.bfloat16,)
"""The dtypes of grads for which, if only the gradient of the weights is needed, the grads before
ReLU and pooling are not stored. In float32, which only tests convolve in here, Triton 3.6 computes
wrong gradients this way."""


def convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    padding: Padding,
    stride: tuple[int, int],
    *,
    relu: bool,
    pool: Windows | None,
    mask: KeyedMask | None = None,
    tap: Tap | None = None,
) -> Tensor:
    """`ops.convolve`; float32 weights get float32 gradients."""
    height, width = weight.shape[3:]
    keys, drops = (None, Drops()) if mask is None else (mask.keys, drops_of(mask))
    geometry = Geometry((height, width), stride, relu, pool, drops)
    alive, note = (None, None) if tap is None else tap
    return apply(Convolve, x, weight, bias, keys, padding, geometry, alive, note)


def drops_of(mask: KeyedMask) -> Drops:
    """The dropout of a mask, as arguments of kernels."""
    return Drops(signed(mask.word * GOLDEN), mask.num_dropped)


def convolve_channels(
    x: Tensor, weight: Tensor, bias: Tensor | None, padding: Padding, stride: tuple[int, int]
) -> Tensor:
    """`ops.convolve_channels`; the gradients of weights have the dtype of the weights."""
    height, width = weight.shape[3:]
    geometry = Geometry((height, width), stride)
    return apply(ConvolveChannels, x, weight, bias, padding, geometry)


def dropout(x: Tensor, mask: KeyedMask, *, whole_channels: bool) -> Tensor:
    """`ops.dropout` of images [C * B, channels, H, W] or rows [C, B, n]."""
    return apply(Dropout, x, mask.keys, drops_of(mask), whole_channels)


class Convolve(torch.autograd.Function):
    """A convolution of C clients, with bias, ReLU, pooling and then dropout.

    Images that are read by taps are stored unchanged, and kernels mask their padding. Other images
    are stored with their padding, and with spare channels of zeros.

    With a tap, the gradients of weights are those of every image, as if it were a client.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        keys: Tensor | None,
        padding: Padding,
        geometry: Geometry,
        _alive: Tensor | None = None,
        note: Note | None = None,
    ) -> Tensor:
        images = x.permute(0, 2, 3, 1).contiguous()
        channels, masked = images.shape[3], padding
        spare = spare_channels(geometry.size, channels)
        if not by_taps(channels):
            images, masked = borders.padded(images, padding, channels + spare), NO_PADDING
        kernel = _kernels(weight, spare, x.dtype)
        bias = None if bias is None else bias.contiguous()
        kept: Tensor | None
        if geometry.pool is not None:
            y, kept = pooled.pooled_product(images, kernel, bias, keys, geometry, masked)
        else:
            y = convolution.product(images, kernel, bias, geometry, masked)
            kept = y if geometry.relu else None
        ctx.save_for_backward(images, kernel, kept)
        ctx.geometry, ctx.padding, ctx.masked = geometry, padding, masked
        ctx.channels, ctx.size, ctx.has_bias = channels, x.shape[2:], bias is not None
        ctx.note = note
        return y.permute(0, 3, 1, 2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        images, kernel, kept = ctx.saved_tensors
        count = len(kernel) if ctx.note is None else len(images)
        geometry, needs_dx = ctx.geometry, ctx.needs_input_grad[0]
        dy = grads[0].permute(0, 2, 3, 1).contiguous()
        full = _full_padding(geometry.size, ctx.padding)
        shifts = convolution_gradient.by_shifts(images.shape[3], geometry, ctx.masked)
        border = _border(dy, geometry, full, needs_dx, kept is not None and shifts)
        size = result_size(images, geometry, ctx.masked)
        stored = needs_dx or shifts or dy.dtype not in UNSTORED
        if any(border) or (kept is not None and stored):
            dy, kept = borders.through_epilogue(dy, kept, size, border, geometry), None
        left, _, top, _ = border
        read = (top, left), count, geometry
        if shifts:
            dw, db = convolution_gradient.shifted_gradient(
                images, dy, *read, ctx.masked, ctx.has_bias
            )
        else:  # if `kept` is left, these are still the grads after ReLU and pooling
            whole = borders.padded(images, ctx.masked, images.shape[3])
            dw, db = convolution_gradient.kernel_gradient(whole, dy, *read, ctx.has_bias, kept)
        dw = dw.view(count, *geometry.size, images.shape[3], -1)[:, :, :, : ctx.channels]
        dw = dw.contiguous()
        own: tuple[Tensor | None, ...] = dw.permute(0, 4, 3, 1, 2), db
        if ctx.note is not None:
            ctx.note(dw, db)
            own = None, None
        dx = None
        if needs_dx:
            if geometry.stride != (1, 1) and by_taps(dy.shape[3]):
                dx = convolution.strided_gradient(
                    dy, kernel, ctx.size, images.shape[3], geometry, ctx.padding
                )
            else:
                if geometry.stride != (1, 1):
                    dense = result_size(images, Geometry(geometry.size), ctx.masked)
                    dy = dilate(dy, dense, geometry.stride)
                dx = _image_grads(dy, kernel, geometry.size, images.shape[3], border, full)
            dx = dx[..., : ctx.channels].permute(0, 3, 1, 2)
        return dx, *own, None, None, None, None, None


def _kernels(weight: Tensor, spare: int, dtype: torch.dtype) -> Tensor:
    """Kernels [C, h * w * channels, out] of weights, in the dtype of the multiplications.

    If weights are stored as [C, h, w, channels, out], this is a cast without a transposition. Spare
    channels are zeros after the others.
    """
    kernel = weight.permute(0, 3, 4, 2, 1)
    if not spare:
        return kernel.to(dtype).contiguous().flatten(1, 3)
    taps = kernel.reshape(-1, 1, *kernel.shape[3:])  # channels as columns, outs as channels
    wider = borders.padded(taps, (0, spare, 0, 0), taps.shape[3], dtype)
    return wider.view(len(kernel), -1, taps.shape[3])


def _full_padding(size: tuple[int, int], padding: Padding) -> Padding:
    """The padding of grads with which the flipped kernels give a gradient for every pixel."""
    (height, width), (left, right, top, bottom) = size, padding
    return width - 1 - left, width - 1 - right, height - 1 - top, height - 1 - bottom


def _border(dy: Tensor, geometry: Geometry, full: Padding, needs_dx: bool, for_dw: bool) -> Padding:
    """The border of zeros to store the grads with, once for both products that read them.

    If no product needs a stored border, masking is cheaper than copying the grads.
    """
    for_dx = needs_dx and geometry.stride == (1, 1) and not by_taps(dy.shape[3])
    return full if (for_dw or for_dx) and min(full) >= 0 else NO_PADDING


def _image_grads(
    dy: Tensor, kernel: Tensor, size: tuple[int, int], channels: int, border: Padding, full: Padding
) -> Tensor:
    """dx [C * B, H, W, channels] of a convolution without stride, from grads with full padding."""
    if border != NO_PADDING:  # it is stored
        masked = NO_PADDING
    elif by_taps(dy.shape[3]):  # the kernel masks it
        masked = full
    else:
        dy, masked = borders.padded(dy, full, dy.shape[3]), NO_PADDING
    return convolution.turned_product(dy, kernel, size, channels, masked)


class ConvolveChannels(torch.autograd.Function):
    """A depthwise convolution of C clients."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        padding: Padding,
        geometry: Geometry,
    ) -> Tensor:
        # No copy if the weights are stored as [C, h, w, 1, channels].
        kernel = weight[:, :, 0].permute(0, 2, 3, 1).flatten(1, 2).contiguous()
        images = x.permute(0, 2, 3, 1).contiguous()
        bias = None if bias is None else bias.contiguous()
        ctx.save_for_backward(images, kernel)
        ctx.geometry, ctx.padding, ctx.has_bias = geometry, padding, bias is not None
        return depthwise.product(images, kernel, bias, geometry, padding).permute(0, 3, 1, 2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        images, kernel = ctx.saved_tensors
        shape = ctx.geometry, ctx.padding
        dy, dx = grads[0].permute(0, 2, 3, 1).contiguous(), None
        if ctx.needs_input_grad[0]:
            dx = depthwise.image_gradient(dy, images, kernel, *shape).permute(0, 3, 1, 2)
        dw, db = depthwise.kernel_gradient(dy, images, len(kernel), *shape, has_bias=ctx.has_bias)
        dw = dw.to(kernel.dtype).contiguous().view(len(kernel), *ctx.geometry.size, 1, -1)
        db = None if db is None else db.to(kernel.dtype)
        return dx, dw.permute(0, 4, 3, 1, 2), db, None, None


class Linear(torch.autograd.Function):
    """y = x w' + bias, with an optional ReLU: one kernel for each direction."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, relu: bool) -> Tensor:
        x, weight = x.contiguous(), weight.contiguous()
        bias = None if bias is None else bias.contiguous()
        y = small_linear.forward(x, weight, bias, relu=relu)
        ctx.save_for_backward(y if relu else None, x, weight)
        ctx.has_bias = bias is not None
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        needs_dx, dy = ctx.needs_input_grad[0], grads[0].contiguous()
        dx, dw, db = small_linear.backward(dy, *ctx.saved_tensors, needs_dx=needs_dx)
        return dx, dw, db if ctx.has_bias else None, None


class FactoredLinear(torch.autograd.Function):
    """y = x w' + bias for w = start - lr * grads' inputs + times * drift (see `Factors`)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, factors: Factors, relu: bool) -> Tensor:
        x, bias = x.contiguous(), None if bias is None else bias.contiguous()
        base = shared_product(x, factors.start.mT)
        drift = None if factors.drift is None else torch.bmm(x, factors.drift.mT)
        y = factored.forward(x, base, drift, factors, bias, relu=relu)
        ctx.save_for_backward(y if relu else None)
        ctx.factors, ctx.has_bias = factors, bias is not None
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (y,), factors = ctx.saved_tensors, ctx.factors
        dy, scores, db = factored.backward_scores(grads[0].contiguous(), y, factors)
        dx = None
        if ctx.needs_input_grad[0]:
            base = shared_product(dy, factors.start)
            drift = None if factors.drift is None else torch.bmm(dy, factors.drift)
            dx = factored.backward(base, drift, scores, factors)
        return dx, db if ctx.has_bias else None, None, None


class Dropout(torch.autograd.Function):
    """y = x * mask, where the mask is a hash of keys: the backward pass computes it again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, keys: Tensor, drops: Drops, whole_channels: bool) -> Tensor:
        ctx.save_for_backward(keys)
        ctx.settings = drops, whole_channels
        return _dropped(x, keys, drops, whole_channels)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (keys,) = ctx.saved_tensors
        return _dropped(grads[0], keys, *ctx.settings), None, None, None


def _dropped(x: Tensor, keys: Tensor, drops: Drops, whole: bool) -> Tensor:
    last = torch.channels_last if x.ndim == 4 else torch.contiguous_format
    x = x.contiguous(memory_format=last)
    return by_key.dropout(x, keys.contiguous(), drops, whole_channels=whole)


class MeanCrossEntropy(torch.autograd.Function):
    """loss[c] = sum over b of weights[c, b] * cross-entropy[c, b] / sum over b of weights[c, b]

    The forward pass also computes the gradient of the logits.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
        inputs = logits.contiguous(), labels.contiguous(), weights.contiguous()
        loss, dlogits = elementwise.mean_cross_entropy(*inputs)
        ctx.save_for_backward(dlogits)
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dlogits,) = ctx.saved_tensors
        return elementwise.scaled_by_client(dlogits, grads[0].contiguous()), None, None
