"""Triton kernels for small linear layers of C clients: one for each direction.

    y[c] = x[c] w[c]' + bias[c]
    dx[c] = dy[c] w[c],   dw[c] = dy[c]' x[c],   db[c] = sum over rows of dy[c]

For small matrices a library spends most of its time on launching one kernel for each product. Here
weights are read in their stored dtype, and cast when they are loaded.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedlens.network.kernels.launch import launchable
from fedlens.network.kernels.sizes import tile


@launchable
def _forward_kernel(
    x, weight, bias, y, batch, features, outs, HAS_BIAS: tl.constexpr, RELU: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """y[c] = x[c] w[c]' + bias[c], optional ReLU. Program (c, j): all rows, BN outs of block j."""
    client = tl.program_id(0).to(tl.int64)
    m = tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    sums = tl.zeros((BM, BN), tl.float32)
    for first in range(0, features, BK):
        k = first + tl.arange(0, BK)
        a = tl.load(
            x + (client * batch + m)[:, None] * features + k[None, :],
            mask=(m < batch)[:, None] & (k < features)[None, :], other=0.0,
        )  # fmt: skip
        b = tl.load(
            weight + (client * outs + n)[None, :] * features + k[:, None],
            mask=(n < outs)[None, :] & (k < features)[:, None], other=0.0,
        )  # fmt: skip
        sums = tl.dot(a, b.to(a.dtype), sums, input_precision="tf32")
    if HAS_BIAS:
        sums += tl.load(bias + client * outs + n, mask=n < outs, other=0.0).to(tl.float32)[None, :]
    if RELU:
        sums = tl.maximum(sums, 0.0, propagate_nan=tl.PropagateNan.ALL)
    entry = (client * batch + m)[:, None] * outs + n[None, :]
    there = (m < batch)[:, None] & (n < outs)[None, :]
    tl.store(y + entry, sums.to(y.dtype.element_ty), mask=there)


@launchable
def _backward_kernel(
    dy, y, x, weight, dx, dw, db, batch, features, outs, RELU: tl.constexpr,
    NEEDS_DX: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """dx[c, m, k], dw[c, n, k] and db[c, n] as above; with RELU, dy is set to 0 where y is 0.

    Program (c, i) computes all rows m, all outs n, and BK features k of block i; the programs of
    block 0 also compute db.
    """
    client = tl.program_id(0).to(tl.int64)
    m = tl.arange(0, BM)
    k = tl.program_id(1) * BK + tl.arange(0, BK)
    row = (client * batch + m)[:, None]
    here = (m < batch)[:, None] & (k < features)[None, :]
    a = tl.load(x + row * features + k[None, :], mask=here, other=0.0)
    sums = tl.zeros((BM, BK), tl.float32)
    for first in range(0, outs, BN):
        n = first + tl.arange(0, BN)
        there = (m < batch)[:, None] & (n < outs)[None, :]
        d = tl.load(dy + row * outs + n[None, :], mask=there, other=0.0)
        if RELU:
            d = tl.where(tl.load(y + row * outs + n[None, :], mask=there, other=0.0) > 0, d, 0.0)
        entry = (client * outs + n)[:, None] * features + k[None, :]
        there = (n < outs)[:, None] & (k < features)[None, :]
        if NEEDS_DX:
            w = tl.load(weight + entry, mask=there, other=0.0)
            sums = tl.dot(d, w.to(d.dtype), sums, input_precision="tf32")
        product = tl.dot(tl.trans(d), a, input_precision="tf32")
        tl.store(dw + entry, product.to(dw.dtype.element_ty), mask=there)
        if tl.program_id(1) == 0:
            tl.store(db + client * outs + n, tl.sum(d.to(tl.float32), 0), mask=n < outs)
    if NEEDS_DX:
        tl.store(dx + row * features + k[None, :], sums.to(dx.dtype.element_ty), mask=here)


def forward(x: Tensor, weight: Tensor, bias: Tensor | None, *, relu: bool) -> Tensor:
    clients, batch, features = x.shape
    outs = weight.shape[1]
    y, wide = x.new_empty(clients, batch, outs), min(tile(outs), 32)
    _forward_kernel[(clients, triton.cdiv(outs, wide))](
        x, weight, weight if bias is None else bias, y, batch, features, outs,
        HAS_BIAS=bias is not None, RELU=relu, BM=tile(batch), BN=wide,
        BK=min(tile(features), 64), num_warps=4, num_stages=3,
    )  # fmt: skip
    return y


def backward(
    dy: Tensor, y: Tensor | None, x: Tensor, weight: Tensor, *, needs_dx: bool
) -> tuple[Tensor | None, Tensor, Tensor]:
    """dx, dw and db, the last two in the dtype of the weight; `y` is given if ReLU followed."""
    clients, batch, features = x.shape
    outs = weight.shape[1]
    dx = torch.empty_like(x) if needs_dx else None
    dw, db = torch.empty_like(weight), weight.new_empty(clients, outs)
    deep = min(tile(features), 64)
    _backward_kernel[(clients, triton.cdiv(features, deep))](
        dy, dy if y is None else y, x, weight, x if dx is None else dx, dw, db, batch, features,
        outs, RELU=y is not None, NEEDS_DX=needs_dx, BM=tile(batch), BN=min(tile(outs), 64),
        BK=deep, num_warps=4, num_stages=2,
    )  # fmt: skip
    return dx, dw, db
