"""Triton kernels for normalising images, the loss, and the steps of solvers.

They compute element by element, or row by row. Elements are counted by their offset in memory.
"""

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedlens.core import Number
from fedlens.network.kernels.launch import launchable
from fedlens.network.kernels.sizes import tile

BLOCK = 1024  # elements of a program


@launchable
def _normalise_kernel(
    images, scale, shift, out, total,
    pixels: tl.constexpr, channels: tl.constexpr, by_channel: tl.constexpr, by_pixel: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """out[image, pixel, channel] = images[image, ...] * scale[channel] + shift[channel].

    A program computes BLOCK elements of `out`. Images are stored channels first or last:
    `by_channel` and `by_pixel` are their strides.
    """
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    channel, pixel = i % channels, i // channels % pixels
    image = (i // channels // pixels).to(tl.int64) * pixels * channels
    there = i < total
    value = tl.load(images + image + channel * by_channel + pixel * by_pixel, mask=there, other=0)
    value = value.to(tl.float32) * tl.load(scale + channel) + tl.load(shift + channel)
    tl.store(out + i, value.to(out.dtype.element_ty), mask=there)


@launchable
def _scale_kernel(x, factors, out, width, BLOCK: tl.constexpr):
    """out[c, i] = factors[c] * x[c, i]; program (c, j) computes BLOCK elements of client c."""
    client = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    entry, there = client * width + i, i < width
    value = tl.load(x + entry, mask=there, other=0.0).to(tl.float32) * tl.load(factors + client)
    tl.store(out + entry, value.to(out.dtype.element_ty), mask=there)


@launchable
def _cross_entropy_kernel(
    logits, labels, weights, losses, dlogits, batch, num_classes,
    ROWS: tl.constexpr, BATCH: tl.constexpr, CLASSES: tl.constexpr,
):  # fmt: skip
    """losses[c] and dlogits[c, b, l]; a program computes one client, ROWS examples at a time.

    With w[b] = weights[c, b] / max(their sum, 1e-12) and the softmax p of logits[c, b],

        losses[c] = sum over b of w[b] * -log p[label of b]
        dlogits[c, b, l] = w[b] * (p[l] - (1 if l is the label of b else 0))
    """
    client = tl.program_id(0).to(tl.int64)
    b = tl.arange(0, BATCH)
    weight = tl.load(weights + client * batch + b, mask=b < batch, other=0.0).to(tl.float32)
    total = tl.maximum(tl.sum(weight, 0), 1e-12)
    c = tl.arange(0, CLASSES)
    summed = tl.zeros((ROWS,), tl.float32)
    for first in range(0, batch, ROWS):
        r = first + tl.arange(0, ROWS)
        row = client * batch + r
        there = (r < batch)[:, None] & (c < num_classes)[None, :]
        entry = row[:, None] * num_classes + c[None, :]
        z = tl.load(logits + entry, mask=there, other=-float("inf")).to(tl.float32)
        z = tl.where((r < batch)[:, None], z, 0.0)
        label = tl.load(labels + row, mask=r < batch, other=0)
        w = tl.load(weights + row, mask=r < batch, other=0.0).to(tl.float32) / total
        top = tl.max(z, 1)
        e = tl.exp(z - top[:, None])
        norm = tl.sum(e, 1)
        right = c[None, :] == label[:, None]
        loss = tl.log(norm) + top - tl.sum(tl.where(right, z, 0.0), 1)
        summed += tl.where(w > 0, w * loss, 0.0)
        dz = (e / norm[:, None] - right.to(tl.float32)) * w[:, None]
        tl.store(dlogits + entry, dz.to(dlogits.dtype.element_ty), mask=there)
    tl.store(losses + client, tl.sum(summed, 0))


@triton.jit
def _number_of(number, first, i, row_size, there, KIND: tl.constexpr):
    """A number that is the same for all clients, or that of the client of element first + i."""
    if KIND == "each":
        client = first // row_size  # one 64-bit division per program; the others are 32-bit
        client += ((first % row_size).to(tl.int32) + i) // row_size
        number = tl.load(number + client, mask=there)
    elif KIND == "one":
        number = tl.load(number)
    return number


@launchable(do_not_specialize_on_alignment=["lr", "momentum", "decay"])
def _sgd_kernel(
    w, grads, velocity, lr, momentum, decay, decaying, sizes, row_sizes,
    NUM: tl.constexpr, HAS_VELOCITY: tl.constexpr, HAS_DECAY: tl.constexpr, NESTEROV: tl.constexpr,
    LR_KIND: tl.constexpr, MOMENTUM_KIND: tl.constexpr, DECAY_KIND: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """d = grad + decay * w;  v = momentum * v + d;  w = w - lr * v, for NUM tensors.

    With NESTEROV the last is w - lr * (d + momentum * v). Without HAS_VELOCITY v is d. Tensor i
    decays if `decaying[i]` is 1, not 0. The first programs update a block of tensor 0 each, the
    next ones of tensor 1, and so on. Each client has `row_sizes[i]` elements of tensor i, stored
    client by client. lr, momentum and decay are numbers, tensors of one element, or tensors [C].
    """
    program = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    for t in tl.static_range(NUM):
        blocks = tl.cdiv(sizes[t], BLOCK)
        if (program >= 0) & (program < blocks):
            first = program.to(tl.int64) * BLOCK
            e, row_size = first + i, row_sizes[t]
            there = e < sizes[t]
            value = tl.load(w[t] + e, mask=there)
            d = tl.load(grads[t] + e, mask=there)
            if HAS_DECAY:
                fading = _number_of(decay, first, i, row_size, there, DECAY_KIND)
                d += fading * decaying[t] * value
            if HAS_VELOCITY:
                kept = _number_of(momentum, first, i, row_size, there, MOMENTUM_KIND)
                v = kept * tl.load(velocity[t] + e, mask=there) + d
                tl.store(velocity[t] + e, v, mask=there)
                d = d + kept * v if NESTEROV else v
            value -= _number_of(lr, first, i, row_size, there, LR_KIND) * d
            tl.store(w[t] + e, value, mask=there)
        program -= blocks


@launchable(do_not_specialize_on_alignment=["lr", "decay"])
def _local_step_kernel(
    w, grads, server, drift, lr, decay, sizes, row_sizes, server_sizes,
    NUM: tl.constexpr, HAS_DRIFT: tl.constexpr, LR_KIND: tl.constexpr, DECAY_KIND: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """w = s + decay * (w - s) - lr * (grad + drift), for NUM tensors; programs as in `_sgd_kernel`.

    The server's s has `server_sizes[i]` elements: those of one model that all clients share, or
    those of one model for each client.
    """
    program = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    for t in tl.static_range(NUM):
        blocks = tl.cdiv(sizes[t], BLOCK)
        if (program >= 0) & (program < blocks):
            first = program.to(tl.int64) * BLOCK
            e, row_size = first + i, row_sizes[t]
            there = e < sizes[t]
            grad = tl.load(grads[t] + e, mask=there)
            if HAS_DRIFT:
                grad += tl.load(drift[t] + e, mask=there)
            value = tl.load(w[t] + e, mask=there)
            start = tl.load(server[t] + e % server_sizes[t], mask=there)
            kept = _number_of(decay, first, i, row_size, there, DECAY_KIND)
            value = start + kept * (value - start)
            value -= _number_of(lr, first, i, row_size, there, LR_KIND) * grad
            tl.store(w[t] + e, value, mask=there)
        program -= blocks


def sgd_(
    params: list[Tensor], grads: list[Tensor], velocity: list[Tensor], lr: Number, momentum: Number,
    decay: Number, decaying: list[bool], *, nesterov: bool,
) -> None:  # fmt: skip
    """`ops.sgd_`, in one kernel."""
    sizes, row_sizes = _sizes(params)
    _sgd_kernel[_programs(sizes)](
        tuple(params), tuple(grads), tuple(velocity or params),
        *map(_as_it_lies, (lr, momentum, decay)), tuple(map(float, decaying)), sizes, row_sizes,
        NUM=len(params), HAS_VELOCITY=bool(velocity), HAS_DECAY=any(decaying), NESTEROV=nesterov,
        LR_KIND=_kind(lr), MOMENTUM_KIND=_kind(momentum), DECAY_KIND=_kind(decay), BLOCK=BLOCK,
    )  # fmt: skip


def local_step_(
    params: list[Tensor], grads: list[Tensor], server: list[Tensor], drift: list[Tensor],
    lr: Number, decay: Number,
) -> None:  # fmt: skip
    """`ops.local_step_`, in one kernel."""
    sizes, row_sizes = _sizes(params)
    _local_step_kernel[_programs(sizes)](
        tuple(params), tuple(grads), tuple(server), tuple(drift or grads),
        *map(_as_it_lies, (lr, decay)), sizes, row_sizes, tuple(t.numel() for t in server),
        NUM=len(params), HAS_DRIFT=bool(drift), LR_KIND=_kind(lr), DECAY_KIND=_kind(decay),
        BLOCK=BLOCK,
    )  # fmt: skip


def _sizes(tensors: list[Tensor]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The number of elements of each tensor [C, ...], and of one client in it."""
    return tuple(t.numel() for t in tensors), tuple(t.numel() // len(t) for t in tensors)


def _programs(sizes: tuple[int, ...]) -> tuple[int]:
    return (sum(triton.cdiv(size, BLOCK) for size in sizes),)


def _as_it_lies(number: Number) -> Number:
    return number.contiguous() if isinstance(number, Tensor) else number


def _kind(number: Number) -> Literal["number", "one", "each"]:
    """The KIND of `_number_of`: a number, a tensor of one element, or a tensor [C]."""
    if not isinstance(number, Tensor):
        return "number"
    return "one" if number.numel() == 1 else "each"


def normalise(images: Tensor, scale: Tensor, shift: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes [N, channels, H, W] * scale + shift, both [channels], as channels-last images."""
    count, channels, height, width = images.shape
    if images.numel() >= 2**31:  # the kernel uses 32-bit offsets
        halves = images.split(-(-count // 2))
        return torch.cat([normalise(half, scale, shift, dtype) for half in halves])
    out = torch.empty(count, height, width, channels, dtype=dtype, device=images.device)
    is_last = images.stride(1) == 1 and channels > 1
    if not is_last:
        images = images.contiguous()
    by_channel, by_pixel = (1, channels) if is_last else (height * width, 1)
    _normalise_kernel[(triton.cdiv(out.numel(), BLOCK),)](
        images, scale, shift, out, out.numel(), height * width, channels, by_channel, by_pixel,
        BLOCK=BLOCK,
    )  # fmt: skip
    return out.permute(0, 3, 1, 2)


def mean_cross_entropy(
    logits: Tensor, labels: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The weighted mean [C] of the losses of logits [C, B, L], and its gradient [C, B, L]."""
    clients, batch, num_classes = logits.shape
    losses = logits.new_empty(clients, dtype=torch.float32)
    dlogits = torch.empty_like(logits)
    classes = tile(num_classes)
    _cross_entropy_kernel[(clients,)](
        logits, labels, weights, losses, dlogits, batch, num_classes,
        ROWS=max(1, min(tile(batch), 4096 // classes)), BATCH=tile(batch), CLASSES=classes,
    )  # fmt: skip
    return losses, dlogits


def scaled_by_client(x: Tensor, factors: Tensor) -> Tensor:
    """A contiguous x [C, ...] times factors [C], in the dtype of x."""
    out, width = torch.empty_like(x), x[0].numel()
    _scale_kernel[(len(x), triton.cdiv(width, BLOCK))](x, factors, out, width, BLOCK=BLOCK)
    return out
