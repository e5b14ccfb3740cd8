"""Triton kernels for factored linear layers of C clients (see `Factors`).

Client c has inputs X[c] and grads D[c], with a row k for each example it has seen: `each` rows a
step, for the `step` steps before this one; later rows are not read. Its matrix is

    w = start - lr * sum over k of fade(k) * D[c, k]' X[c, k] + times[step] * drift

with fade(k) = 2 ** (log_decay * steps taken since row k). So, for the rows x of a batch,

    y = x start' - lr * (fade * (x X')) D + times * (x drift')
    dx = dy start - lr * (fade * (dy D')) X + times * (dy drift)

The products with `start` and `drift` are arguments, as `base` and `drift`. The forward pass appends
the step's own x to X, the backward pass appends its own dy to D. The C clients form groups of
`size` with the same lr, log_decay and times.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedlens.network.kernels.launch import launchable
from fedlens.network.kernels.sizes import PROGRAMS, tile
from fedlens.network.stacked.products import Factors

# Step numbers are elements of one tensor, and every second one is not aligned: without this, Triton
# would compile a second kernel for them.
_ANYWHERE = ["step"]


@triton.jit
def _fade(k, each, seen, log_decay):
    """fade(k) of row k: its step is k // each, and seen // each steps were taken."""
    return tl.exp2(log_decay * (seen // each - 1 - k // each).to(tl.float32))


@launchable(do_not_specialize_on_alignment=_ANYWHERE)
def _scores_kernel(
    x, inputs, step, each, out, clients, batch, features, rows,
    chunk, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """out[part, c, m, n] = sum over the part's features k of x[c, m, k] * X[c, n, k].

    Program (c, part, j) computes all rows m of the batch and BN rows n of X of block j. Those of
    block 0 also store x in X.
    """
    client = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    seen = tl.load(step).to(tl.int32) * each
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
        entry = out + ((part * clients + client) * batch + m)[:, None] * rows + n[None, :]
        tl.store(entry, sums, mask=here & (n < seen)[None, :])


@launchable(do_not_specialize_on_alignment=_ANYWHERE)
def _forward_kernel(
    base, drift, times, scores, grads, step, each, bias, y, clients, batch, outs, rows, rates,
    log_decays, size, HAS_DRIFT: tl.constexpr, PARTS: tl.constexpr, HAS_BIAS: tl.constexpr,
    RELU: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """y[c, m, n] = base - lr * (fade * scores) D + times * drift + bias, with an optional ReLU.

    Program (c, j) computes all rows m of the batch and BN outs n of block j. The scores are the sum
    of PARTS parts.
    """
    client = tl.program_id(0).to(tl.int64)
    lr, log_decay = tl.load(rates + client // size), tl.load(log_decays + client // size)
    seen = tl.load(step).to(tl.int32) * each
    m = tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    sums = tl.zeros((BM, BN), tl.float32)
    for start in range(0, seen, BK):
        k = start + tl.arange(0, BK)
        there = (m < batch)[:, None] & (k < seen)[None, :]
        score = tl.zeros((BM, BK), tl.float32)
        for part in tl.static_range(PARTS):
            entry = scores + ((part * clients + client) * batch + m)[:, None] * rows + k[None, :]
            score += tl.load(entry, mask=there, other=0.0)
        score *= _fade(k, each, seen, log_decay)[None, :]
        d = tl.load(
            grads + (client * rows + k)[:, None] * outs + n[None, :],
            mask=(k < seen)[:, None] & (n < outs)[None, :], other=0.0,
        )  # fmt: skip
        sums = tl.dot(score.to(d.dtype), d, sums, input_precision="tf32")
    entry = (client * batch + m)[:, None] * outs + n[None, :]
    there = (m < batch)[:, None] & (n < outs)[None, :]
    result = tl.load(base + entry, mask=there, other=0.0).to(tl.float32) - lr * sums
    if HAS_DRIFT:
        further = tl.load(drift + entry, mask=there, other=0.0).to(tl.float32)
        result += tl.load(times + client // size * (rows // each + 1) + seen // each) * further
    if HAS_BIAS:
        result += tl.load(bias + client * outs + n, mask=n < outs, other=0.0).to(tl.float32)[
            None, :
        ]
    if RELU:
        result = tl.maximum(result, 0.0, propagate_nan=tl.PropagateNan.ALL)
    tl.store(y + entry, result.to(y.dtype.element_ty), mask=there)


@launchable(do_not_specialize_on_alignment=_ANYWHERE)
def _backward_scores_kernel(
    dy, y, grads, step, each, out, scores, bias, batch, outs, rows,
    RELU: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """With d = dy before ReLU: out = d, bias[c, n] = sum over m of d, scores[c, m, k] = d[m] D[k]'.

    The last program of client c stores all of d, in `out` and in D, and its sums; each program
    (c, j) before it computes the scores of BN rows k of D of block j.
    """
    client = tl.program_id(0).to(tl.int64)
    seen = tl.load(step).to(tl.int32) * each
    m = tl.arange(0, BM)
    block = tl.program_id(1)
    if block == tl.num_programs(1) - 1:
        for first in range(0, outs, BK):
            k = first + tl.arange(0, BK)
            there = (m < batch)[:, None] & (k < outs)[None, :]
            entry = (client * batch + m)[:, None] * outs + k[None, :]
            d = tl.load(dy + entry, mask=there, other=0.0)
            if RELU:
                d = tl.where(tl.load(y + entry, mask=there, other=0.0) > 0, d, 0.0)
            tl.store(out + entry, d, mask=there)
            kept = grads + (client * rows + seen + m)[:, None] * outs + k[None, :]
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
            past = grads + (client * rows + n)[None, :] * outs + c[:, None]
            b = tl.load(past, mask=(n < seen)[None, :] & (c < outs)[:, None], other=0.0)
            sums = tl.dot(a, b, sums, input_precision="tf32")
        score = scores + (client * batch + m)[:, None] * rows + n[None, :]
        tl.store(score, sums, mask=(m < batch)[:, None] & (n < seen)[None, :])


@launchable(do_not_specialize_on_alignment=_ANYWHERE)
def _backward_kernel(
    base, drift, times, scores, inputs, step, each, dx, batch, features, rows, rates,
    log_decays, size, HAS_DRIFT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """dx[c, m, n] = base - lr * (fade * scores) X + times * drift.

    Program (c, j) computes all rows m of the batch and BN features n of block j.
    """
    client = tl.program_id(0).to(tl.int64)
    lr, log_decay = tl.load(rates + client // size), tl.load(log_decays + client // size)
    seen = tl.load(step).to(tl.int32) * each
    m = tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    entry = (client * batch + m)[:, None] * features + n[None, :]
    there = (m < batch)[:, None] & (n < features)[None, :]
    result = tl.load(base + entry, mask=there, other=0.0).to(tl.float32)  # overlaps with the loop
    sums = tl.zeros((BM, BN), tl.float32)
    for start in range(0, seen, BK):
        k = start + tl.arange(0, BK)
        a = tl.load(
            scores + (client * batch + m)[:, None] * rows + k[None, :],
            mask=(m < batch)[:, None] & (k < seen)[None, :], other=0.0,
        )  # fmt: skip
        b = tl.load(
            inputs + (client * rows + k)[:, None] * features + n[None, :],
            mask=(k < seen)[:, None] & (n < features)[None, :], other=0.0,
        )  # fmt: skip
        a *= _fade(k, each, seen, log_decay)[None, :]
        sums = tl.dot(a.to(b.dtype), b, sums, input_precision="tf32")
    result -= lr * sums
    if HAS_DRIFT:
        further = tl.load(drift + entry, mask=there, other=0.0).to(tl.float32)
        result += tl.load(times + client // size * (rows // each + 1) + seen // each) * further
    tl.store(dx + entry, result.to(dx.dtype.element_ty), mask=there)


def forward(
    x: Tensor, base: Tensor, drift: Tensor | None, factors: Factors, bias: Tensor | None, *,
    relu: bool,
) -> Tensor:  # fmt: skip
    """y [C, B, out] for x [C, B, n], base [C, B, out] and, if there is one, drift [C, B, out]."""
    clients, batch, features = x.shape
    rows, outs = factors.grads.shape[1:]
    tall, block = tile(batch), min(tile(rows), 64)
    deep = min(tile(features), 256 if tall <= 16 else 128)
    blocks = triton.cdiv(rows, block)
    parts = max(1, min(PROGRAMS // (clients * blocks), triton.cdiv(features, 512)))
    chunk = triton.cdiv(triton.cdiv(features, parts), deep) * deep
    parts = triton.cdiv(features, chunk)
    scores = torch.empty(parts, clients, batch, rows, device=x.device)
    # With many clients there are enough programs: each has fewer stages, and more warps to read.
    warps, stages = (8, 2) if parts == 1 and tall <= 16 else (4, 3)
    _scores_kernel[(clients, parts, blocks)](
        x, factors.inputs, factors.step, factors.batch, scores, clients, batch, features, rows,
        chunk, BM=tall, BN=block, BK=deep, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    y, wide = torch.empty_like(base), min(tile(outs), 64)
    _forward_kernel[(clients, triton.cdiv(outs, wide))](
        base, base if drift is None else drift, _times(factors), scores, factors.grads,
        factors.step, factors.batch, base if bias is None else bias, y, clients, batch, outs, rows,
        factors.lr, factors.log_decay, clients // len(factors.lr), HAS_DRIFT=drift is not None,
        PARTS=parts, HAS_BIAS=bias is not None, RELU=relu, BM=tall, BN=wide,
        BK=min(tile(rows), 64), num_warps=4, num_stages=2,
    )  # fmt: skip
    return y


def backward_scores(
    dy: Tensor, y: Tensor | None, factors: Factors
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The grads d before ReLU, which are stored in D; the scores d D'; and db [C, out].

    `y` is given if ReLU followed.
    """
    clients, batch, outs = dy.shape
    rows = factors.grads.shape[1]
    d, bias = torch.empty_like(dy), torch.empty(clients, outs, device=dy.device)
    scores = torch.empty(clients, batch, rows, device=dy.device)
    block = min(tile(rows), 64)
    few = batch <= 16
    _backward_scores_kernel[(clients, triton.cdiv(rows, block) + 1)](
        dy, dy if y is None else y, factors.grads, factors.step, factors.batch, d, scores, bias,
        batch, outs, rows, RELU=y is not None, BM=tile(batch), BN=block,
        BK=min(tile(outs), 256 if few else 64), num_warps=8 if few else 4, num_stages=2,
    )  # fmt: skip
    return d, scores, bias


def backward(
    base: Tensor, drift: Tensor | None, scores: Tensor, factors: Factors
) -> Tensor:  # fmt: skip
    """dx [C, B, n] for base [C, B, n], from the scores of `backward_scores`."""
    clients, batch, features = base.shape
    dx, (wide, warps) = torch.empty_like(base), (256, 8) if batch <= 16 else (128, 4)
    _backward_kernel[(clients, triton.cdiv(features, wide))](
        base, base if drift is None else drift, _times(factors), scores, factors.inputs,
        factors.step, factors.batch, dx, batch, features, scores.shape[2], factors.lr,
        factors.log_decay, clients // len(factors.lr), HAS_DRIFT=drift is not None,
        BM=tile(batch), BN=wide, BK=16, num_warps=warps, num_stages=3,
    )  # fmt: skip
    return dx


def _times(factors: Factors) -> Tensor:
    return factors.lr if factors.times is None else factors.times
