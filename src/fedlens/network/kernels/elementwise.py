"""Triton kernels of what is done number by number, or row by row.

Normalising, dropout, the loss, and the steps of solvers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedlens.core import Number
from fedlens.keys import FIRST, GOLDEN, SECOND, signed
from fedlens.network.kernels.sizes import tile

_FIRST, _SECOND = tl.constexpr(FIRST), tl.constexpr(SECOND)
_GOLDEN = tl.constexpr(signed(GOLDEN))

MOST = 16  # tensors that one kernel adds to


@triton.jit
def _normalise_kernel(
    images, scale, shift, out, total, pixels, channels, by_channel, by_pixel, BLOCK: tl.constexpr
):  # fmt: skip
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    channel, pixel = i % channels, i // channels % pixels
    image = (i // channels // pixels).to(tl.int64) * pixels * channels
    there = i < total
    value = tl.load(images + image + channel * by_channel + pixel * by_pixel, mask=there, other=0)
    value = value.to(tl.float32) * tl.load(scale + channel) + tl.load(shift + channel)
    tl.store(out + i, value.to(out.dtype.element_ty), mask=there)


@triton.jit
def _mix(z):
    """As in keys.py."""
    z ^= (z.to(tl.uint64) >> 30).to(tl.int64)
    z *= _FIRST
    z ^= (z.to(tl.uint64) >> 27).to(tl.int64)
    z *= _SECOND
    return z ^ (z.to(tl.uint64) >> 31).to(tl.int64)


@triton.jit
def _dropout_kernel(
    x, client_keys, out, word, batch, width, channels, num_dropped, scale, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there, position = i < width, i % channels
    key = _mix(tl.load(client_keys + row // batch) + word)
    counter = ((row % batch) << 32) | (position // 4).to(tl.int64)
    hashed = _mix(counter * _GOLDEN + key)
    lane = (hashed << (48 - 16 * (position % 4))) >> 48
    value = tl.load(x + row * width + i, mask=there, other=0.0).to(tl.float32)
    kept = tl.where(lane >= num_dropped - 32768, value * scale, 0.0)
    tl.store(out + row * width + i, kept.to(out.dtype.element_ty), mask=there)


@triton.jit
def _row_dropout_kernel(
    x, client_keys, out, word, batch, width, num_dropped, scale, BLOCK: tl.constexpr
):  # fmt: skip
    """The same where four positions with one hash lie side by side."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    key = _mix(tl.load(client_keys + row // batch) + word)
    hashed = _mix((((row % batch) << 32) | i.to(tl.int64)) * _GOLDEN + key)
    each = tl.arange(0, 4)
    lane = (hashed[:, None] << (48 - 16 * each)[None, :]) >> 48
    entry = row * width + i[:, None] * 4 + each[None, :]
    there = (i < width // 4)[:, None]
    value = tl.load(x + entry, mask=there, other=0.0).to(tl.float32)
    kept = tl.where(lane >= num_dropped - 32768, value * scale, 0.0)
    tl.store(out + entry, kept.to(out.dtype.element_ty), mask=there)


@triton.jit
def _cross_entropy_kernel(
    logits, labels, weights, losses, slopes, batch, num_classes,
    ROWS: tl.constexpr, BATCH: tl.constexpr, CLASSES: tl.constexpr,
):  # fmt: skip
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
        place = row[:, None] * num_classes + c[None, :]
        z = tl.load(logits + place, mask=there, other=-float("inf")).to(tl.float32)
        z = tl.where((r < batch)[:, None], z, 0.0)
        label = tl.load(labels + row, mask=r < batch, other=0)
        w = tl.load(weights + row, mask=r < batch, other=0.0).to(tl.float32) / total
        top = tl.max(z, 1)
        e = tl.exp(z - top[:, None])
        norm = tl.sum(e, 1)
        right = c[None, :] == label[:, None]
        loss = tl.log(norm) + top - tl.sum(tl.where(right, z, 0.0), 1)
        summed += tl.where(w > 0, w * loss, 0.0)
        slope = (e / norm[:, None] - right.to(tl.float32)) * w[:, None]
        tl.store(slopes + place, slope.to(slopes.dtype.element_ty), mask=there)
    tl.store(losses + client, tl.sum(summed, 0))


@triton.jit
def _step_kernel(
    to, slopes, server, drift, times, sizes, rows, keep, NUM: tl.constexpr,
    HAS_SERVER: tl.constexpr, HAS_DRIFT: tl.constexpr, BY_ROW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Programs of the first tensor, then of the second, and so on.

    Rows of a tensor are so long, and the server's tensors, which stand for every one of them.
    """
    program = tl.program_id(0)
    for i in tl.static_range(NUM):
        blocks = tl.cdiv(sizes[i], BLOCK)
        if (program >= 0) & (program < blocks):
            place = program.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
            there = place < sizes[i]
            slope = tl.load(slopes[i] + place, mask=there)
            if HAS_DRIFT:
                slope += tl.load(drift[i] + place, mask=there)
            value = tl.load(to[i] + place, mask=there)
            if HAS_SERVER:
                start = tl.load(server[i] + place % rows[i], mask=there)
                value = start + keep * (value - start)
            if BY_ROW:
                value += tl.load(times + place // rows[i], mask=there) * slope
            else:
                value += times * slope
            tl.store(to[i] + place, value, mask=there)
        program -= blocks


def add(to: list[Tensor], what: list[Tensor], times: Number) -> bool:
    """to += times * what, in one kernel, if both are float32 and lie alike from end to end.

    Of numbers [C], each row [C, ...] has its own.
    """
    if isinstance(times, Tensor):
        by_row = all(len(t) == times.numel() and t.stride(0) * len(t) == t.numel() for t in to)
        if times.dtype is not torch.float32 or not by_row:
            return False
    return _step(to, what, [], [], times, 1.0)


def contract(
    to: list[Tensor], slopes: list[Tensor], server: list[Tensor], drift: list[Tensor], lr: float,
    keep: float,
) -> bool:  # fmt: skip
    """server + keep (to - server) - lr (slopes + drift), in one kernel where tensors lie alike."""
    return _step(to, slopes, server, drift, -lr, keep)


def _step(
    to: list[Tensor], slopes: list[Tensor], server: list[Tensor], drift: list[Tensor],
    times: Number, keep: float,
) -> bool:  # fmt: skip
    """Without a server, `to` is kept as it is."""
    servers, drifts = server or to, drift or slopes
    every = list(zip(to, slopes, servers, drifts, strict=True))
    alike = all(
        _lie_alike(a, b) and _lie_alike(a, d) and a.stride()[1:] == s.stride()[1:]
        for a, b, s, d in every
    )
    if not 1 <= len(every) <= MOST or not alike:
        return False
    by_row = isinstance(times, Tensor)
    sizes = tuple(t.numel() for t in to)
    rows = tuple(t.numel() // len(t) if by_row else t.numel() for t in servers)
    programs = sum(triton.cdiv(size, 1024) for size in sizes)
    _step_kernel[(programs,)](
        tuple(to), tuple(slopes), tuple(servers), tuple(drifts), times, sizes, rows, keep,
        NUM=len(every), HAS_SERVER=bool(server), HAS_DRIFT=bool(drift), BY_ROW=by_row, BLOCK=1024,
    )  # fmt: skip
    return True


def _lie_alike(a: Tensor, b: Tensor) -> bool:
    dense = a.is_contiguous() or a.permute(_order(a)).is_contiguous()
    return a.dtype is b.dtype is torch.float32 and a.stride() == b.stride() and dense


def _order(a: Tensor) -> list[int]:
    return sorted(range(a.ndim), key=a.stride, reverse=True)


def normalise(images: Tensor, scale: Tensor, shift: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes [N, channels, H, W] times scale plus shift [channels], as images channels last."""
    count, channels, height, width = images.shape
    if images.numel() >= 2**31:  # the kernel counts in 32 bits
        halves = images.split(-(-count // 2))
        return torch.cat([normalise(half, scale, shift, dtype) for half in halves])
    out = torch.empty(count, height, width, channels, dtype=dtype, device=images.device)
    is_last = images.stride(1) == 1 and channels > 1
    if not is_last:
        images = images.contiguous()
    by_channel, by_pixel = (1, channels) if is_last else (height * width, 1)
    _normalise_kernel[(triton.cdiv(out.numel(), 1024),)](
        images, scale, shift, out, out.numel(), height * width, channels, by_channel, by_pixel,
        BLOCK=1024,
    )  # fmt: skip
    return out.permute(0, 3, 1, 2)


def dropout(
    x: Tensor, client_keys: Tensor, word: int, num_dropped: int, *, whole_channels: bool
) -> Tensor:
    """`layers.keyed_dropout` of [C * B, channels, H, W] that lie channels last, or [C, B, n]."""
    is_images = x.ndim == 4
    out = torch.empty_like(x)
    batch = x.shape[0] // len(client_keys) if is_images else x.shape[1]
    width = x.shape[1:].numel() if is_images else x.shape[2]
    rows, word = x.numel() // width, signed(word * GOLDEN)
    scale = 2**16 / (2**16 - num_dropped)
    if not whole_channels and width % 4 == 0:
        block = min(tile(width // 4), 512)
        _row_dropout_kernel[(rows, triton.cdiv(width // 4, block))](
            x, client_keys, out, word, batch, width, num_dropped, scale, BLOCK=block
        )
        return out
    channels = x.shape[1] if is_images and whole_channels else width
    _dropout_kernel[(rows, triton.cdiv(width, 1024))](
        x, client_keys, out, word, batch, width, channels, num_dropped, scale, BLOCK=1024
    )
    return out


def cross_entropy(logits: Tensor, labels: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """The weighted mean [C] of the losses of logits [C, B, L], and its slopes [C, B, L]."""
    clients, batch, num_classes = logits.shape
    losses = logits.new_empty(clients, dtype=torch.float32)
    slopes = torch.empty_like(logits)
    classes = tile(num_classes)
    _cross_entropy_kernel[(clients,)](
        logits, labels, weights, losses, slopes, batch, num_classes,
        ROWS=max(1, min(tile(batch), 4096 // classes)), BATCH=tile(batch), CLASSES=classes,
    )  # fmt: skip
    return losses, slopes
