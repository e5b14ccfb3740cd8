"""Triton kernels of factored linear layers: what engines/factored.py describes, for C clients.

The rows of a client's inputs X and slopes D are the examples it has seen, `each` rows a step and
`taken` steps of them; what lies behind is not read. Between the two directions of a step `taken` is
raised by one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedlens.network.factors import Factors
from fedlens.network.kernels.sizes import PROGRAMS, tile


@triton.jit
def _fade(k, each, seen, log_decay):
    """What later steps leave of the parts of rows k."""
    return tl.exp2(log_decay * (seen // each - 1 - k // each).to(tl.float32))


@triton.jit
def _scores_kernel(
    x, inputs, taken, each, out, clients, batch, features, rows,
    chunk, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """x X' over a part of the features; the step's own x is put down in X, behind the others."""
    client = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    seen = tl.load(taken).to(tl.int32) * each
    m = tl.arange(0, BM)
    n = tl.program_id(2) * BN + tl.arange(0, BN)
    mine = x + client * batch * features + m[:, None] * features
    past = inputs + client * rows * features
    here = (m < batch)[:, None]
    last = tl.minimum((part + 1) * chunk, features)
    if tl.program_id(2) == 0:
        for first in range(part * chunk, last, BK):
            k = first + tl.arange(0, BK)
            there = here & (k < last)[None, :]
            a = tl.load(mine + k[None, :], mask=there, other=0.0)
            tl.store(past + (seen + m)[:, None] * features + k[None, :], a, mask=there)
    if tl.program_id(2) * BN < seen:
        sums = tl.zeros((BM, BN), tl.float32)
        for first in range(part * chunk, last, BK):
            k = first + tl.arange(0, BK)
            a = tl.load(mine + k[None, :], mask=here & (k < last)[None, :], other=0.0)
            there = (n < seen)[None, :] & (k < last)[:, None]
            b = tl.load(past + n[None, :] * features + k[:, None], mask=there, other=0.0)
            sums = tl.dot(a, b, sums, input_precision="tf32")
        place = out + ((part * clients + client) * batch + m)[:, None] * rows + n[None, :]
        tl.store(place, sums, mask=here & (n < seen)[None, :])


@triton.jit
def _forward_kernel(
    base, drift, times, scores, slopes, taken, each, bias, y, clients, batch, outs, rows, rates,
    log_decays, size, HAS_DRIFT: tl.constexpr, PARTS: tl.constexpr, HAS_BIAS: tl.constexpr,
    RELU: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """base - lr (x X') D, bias and ReLU."""
    client = tl.program_id(0).to(tl.int64)
    lr, log_decay = tl.load(rates + client // size), tl.load(log_decays + client // size)
    seen = tl.load(taken).to(tl.int32) * each
    m = tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    sums = tl.zeros((BM, BN), tl.float32)
    for start in range(0, seen, BK):
        k = start + tl.arange(0, BK)
        there = (m < batch)[:, None] & (k < seen)[None, :]
        score = tl.zeros((BM, BK), tl.float32)
        for part in tl.static_range(PARTS):
            place = scores + ((part * clients + client) * batch + m)[:, None] * rows + k[None, :]
            score += tl.load(place, mask=there, other=0.0)
        score *= _fade(k, each, seen, log_decay)[None, :]
        d = tl.load(
            slopes + (client * rows + k)[:, None] * outs + n[None, :],
            mask=(k < seen)[:, None] & (n < outs)[None, :], other=0.0,
        )  # fmt: skip
        sums = tl.dot(score.to(d.dtype), d, sums, input_precision="tf32")
    place = (client * batch + m)[:, None] * outs + n[None, :]
    there = (m < batch)[:, None] & (n < outs)[None, :]
    result = tl.load(base + place, mask=there, other=0.0).to(tl.float32) - lr * sums
    if HAS_DRIFT:
        further = tl.load(drift + place, mask=there, other=0.0).to(tl.float32)
        result += tl.load(times + client // size * (rows // each + 1) + seen // each) * further
    if HAS_BIAS:
        result += tl.load(bias + client * outs + n, mask=n < outs, other=0.0).to(tl.float32)[
            None, :
        ]
    if RELU:
        result = tl.maximum(result, 0.0, propagate_nan=tl.PropagateNan.ALL)
    tl.store(y + place, result.to(y.dtype.element_ty), mask=there)


@triton.jit
def _slopes_kernel(
    dy, y, slopes, taken, each, out, weights, bias, batch, outs, rows,
    RELU: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """The slopes before ReLU: d D', and by the last program of a client, as they are, put down in
    D, and summed for the bias."""
    client = tl.program_id(0).to(tl.int64)
    seen = (tl.load(taken).to(tl.int32) - 1) * each
    m = tl.arange(0, BM)
    block = tl.program_id(1)
    if block == tl.num_programs(1) - 1:
        for first in range(0, outs, BK):
            k = first + tl.arange(0, BK)
            there = (m < batch)[:, None] & (k < outs)[None, :]
            place = (client * batch + m)[:, None] * outs + k[None, :]
            d = tl.load(dy + place, mask=there, other=0.0)
            if RELU:
                d = tl.where(tl.load(y + place, mask=there, other=0.0) > 0, d, 0.0)
            tl.store(out + place, d, mask=there)
            kept = slopes + (client * rows + seen + m)[:, None] * outs + k[None, :]
            tl.store(kept, d, mask=there)
            tl.store(bias + client * outs + k, tl.sum(d.to(tl.float32), 0), mask=k < outs)
    elif block * BN < seen:
        n = block * BN + tl.arange(0, BN)
        sums = tl.zeros((BM, BN), tl.float32)
        for begin in range(0, outs, BK):
            c = begin + tl.arange(0, BK)
            here = (m < batch)[:, None] & (c < outs)[None, :]
            entry = (client * batch + m)[:, None] * outs + c[None, :]
            a = tl.load(dy + entry, mask=here, other=0.0)
            if RELU:
                a = tl.where(tl.load(y + entry, mask=here, other=0.0) > 0, a, 0.0)
            past = slopes + (client * rows + n)[None, :] * outs + c[:, None]
            b = tl.load(past, mask=(n < seen)[None, :] & (c < outs)[:, None], other=0.0)
            sums = tl.dot(a, b, sums, input_precision="tf32")
        score = weights + (client * batch + m)[:, None] * rows + n[None, :]
        tl.store(score, sums, mask=(m < batch)[:, None] & (n < seen)[None, :])


@triton.jit
def _backward_kernel(
    base, drift, times, weights, inputs, taken, each, dx, batch, features, rows, rates,
    log_decays, size, HAS_DRIFT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """base - lr (d D') X."""
    client = tl.program_id(0).to(tl.int64)
    lr, log_decay = tl.load(rates + client // size), tl.load(log_decays + client // size)
    seen = (tl.load(taken).to(tl.int32) - 1) * each
    m = tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    sums = tl.zeros((BM, BN), tl.float32)
    for start in range(0, seen, BK):
        k = start + tl.arange(0, BK)
        a = tl.load(
            weights + (client * batch + m)[:, None] * rows + k[None, :],
            mask=(m < batch)[:, None] & (k < seen)[None, :], other=0.0,
        )  # fmt: skip
        b = tl.load(
            inputs + (client * rows + k)[:, None] * features + n[None, :],
            mask=(k < seen)[:, None] & (n < features)[None, :], other=0.0,
        )  # fmt: skip
        a *= _fade(k, each, seen, log_decay)[None, :]
        sums = tl.dot(a.to(b.dtype), b, sums, input_precision="tf32")
    place = (client * batch + m)[:, None] * features + n[None, :]
    there = (m < batch)[:, None] & (n < features)[None, :]
    result = tl.load(base + place, mask=there, other=0.0).to(tl.float32) - lr * sums
    if HAS_DRIFT:
        further = tl.load(drift + place, mask=there, other=0.0).to(tl.float32)
        result += tl.load(times + client // size * (rows // each + 1) + seen // each) * further
    tl.store(dx + place, result.to(dx.dtype.element_ty), mask=there)


def forward(
    x: Tensor, base: Tensor, drift: Tensor | None, factors: Factors, bias: Tensor | None, *,
    relu: bool,
) -> Tensor:  # fmt: skip
    """base - lr (x X') D + bias for x [C, B, n] and base [C, B, out]; x is put down in X.

    `drift` [C, B, out] is what the clients' drift makes of x.
    """
    clients, batch, features = x.shape
    rows, outs = factors.slopes.shape[1:]
    tall, block = tile(batch), min(tile(rows), 64)
    deep = min(tile(features), 256 if tall <= 16 else 128)
    blocks = triton.cdiv(rows, block)
    parts = max(1, min(PROGRAMS // (clients * blocks), triton.cdiv(features, 512)))
    chunk = triton.cdiv(triton.cdiv(features, parts), deep) * deep
    parts = triton.cdiv(features, chunk)
    scores = torch.empty(parts, clients, batch, rows, device=x.device)
    _scores_kernel[(clients, parts, blocks)](
        x, factors.inputs, factors.taken, factors.batch, scores, clients, batch, features, rows,
        chunk, BM=tall, BN=block, BK=deep, num_warps=4, num_stages=3,
    )  # fmt: skip
    y, wide = torch.empty_like(base), min(tile(outs), 64)
    _forward_kernel[(clients, triton.cdiv(outs, wide))](
        base, base if drift is None else drift, _times(factors), scores, factors.slopes,
        factors.taken, factors.batch, base if bias is None else bias, y, clients, batch, outs, rows,
        factors.lr, factors.log_decay, clients // len(factors.lr), HAS_DRIFT=drift is not None,
        PARTS=parts, HAS_BIAS=bias is not None, RELU=relu, BM=tall, BN=wide,
        BK=min(tile(rows), 64), num_warps=4, num_stages=2,
    )  # fmt: skip
    return y


def slopes_back(dy: Tensor, y: Tensor | None, factors: Factors) -> tuple[Tensor, Tensor, Tensor]:
    """The slopes d before ReLU, which are put down in D; d D'; and d summed for the bias."""
    clients, batch, outs = dy.shape
    rows = factors.slopes.shape[1]
    d, bias = torch.empty_like(dy), torch.empty(clients, outs, device=dy.device)
    weights = torch.empty(clients, batch, rows, device=dy.device)
    block = min(tile(rows), 64)
    few = batch <= 16
    _slopes_kernel[(clients, triton.cdiv(rows, block) + 1)](
        dy, dy if y is None else y, factors.slopes, factors.taken, factors.batch, d, weights, bias,
        batch, outs, rows, RELU=y is not None, BM=tile(batch), BN=block,
        BK=min(tile(outs), 256 if few else 64), num_warps=8 if few else 4, num_stages=2,
    )  # fmt: skip
    return d, weights, bias


def backward(
    base: Tensor, drift: Tensor | None, weights: Tensor, factors: Factors
) -> Tensor:  # fmt: skip
    """base - lr (d D') X for base [C, B, n]."""
    clients, batch, features = base.shape
    dx, wide = torch.empty_like(base), 128
    _backward_kernel[(clients, triton.cdiv(features, wide))](
        base, base if drift is None else drift, _times(factors), weights, factors.inputs,
        factors.taken, factors.batch, dx, batch, features, weights.shape[2], factors.lr,
        factors.log_decay, clients // len(factors.lr), HAS_DRIFT=drift is not None,
        BM=tile(batch), BN=wide, BK=32,
        num_warps=4, num_stages=5 if batch <= 16 else 3,
    )  # fmt: skip
    return dx


def _times(factors: Factors) -> Tensor:
    return factors.lr if factors.times is None else factors.times
