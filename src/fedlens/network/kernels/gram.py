"""A Triton kernel for the products <u_i, u_j> of long rows, all of which it reads once.

Below the diagonal are the same products as above it. So rows are in blocks, and a block is
multiplied by itself and by those before it alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedlens.network.kernels.launch import launchable
from fedlens.network.kernels.sizes import PROGRAMS

MOST = 128  # rows: the sums of a program are in its registers
WIDEST = 64  # rows of a block
COLUMNS = 16  # that are multiplied at once
STAGES = 4  # of which one is multiplied while others are loaded
WARPS = 4


@triton.constexpr_function
def first(blocks, number):
    return blocks[number][0]


@triton.constexpr_function
def size(blocks, number):
    return blocks[number][1]


@launchable
def _products_kernel(
    rows, origin, needed, out, count, columns, by_row,
    BLOCKS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
    HAS_ORIGIN: tl.constexpr,
):  # fmt: skip
    """out[p] = the products of rows [count, columns], less `origin`, over what program p takes.

    It takes each num_programs-th tile, which is COLUMNS of all rows: none if `needed` points to 0.
    BLOCKS are the first row and the number of rows of each block. Each in turn is multiplied by
    itself and those after it: Triton shares out several products among warps well if each has a
    first operand of its own. Of `out` [P, ROWS, ROWS] what is on and below the diagonal is written.
    """
    tiles = tl.cdiv(columns, COLUMNS)
    if HAS_ORIGIN:
        tiles *= tl.load(needed)
    out += tl.program_id(0) * ROWS * ROWS
    for b in tl.static_range(len(BLOCKS)):
        summed = ()
        for a in tl.static_range(b, len(BLOCKS)):
            summed += (tl.zeros((size(BLOCKS, a), size(BLOCKS, b)), tl.float64),)
        for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=STAGES):
            k = tile * COLUMNS + tl.arange(0, COLUMNS)
            x = ()
            for a in tl.static_range(b, len(BLOCKS)):
                r = (first(BLOCKS, a) + tl.arange(0, size(BLOCKS, a))).to(tl.int64)
                there = (r < count)[:, None] & (k < columns)[None, :]
                u = tl.load(rows + r[:, None] * by_row + k[None, :], mask=there, other=0.0)
                u = u.to(tl.float64)
                if HAS_ORIGIN:
                    o = tl.load(origin + k, mask=k < columns, other=0.0)
                    u -= o.to(tl.float64)[None, :]
                x += (u,)
            more = ()
            for a in tl.static_range(len(x)):
                more += (tl.dot(x[a], tl.trans(x[0]), summed[a], out_dtype=tl.float64),)
            summed = more
        j = first(BLOCKS, b) + tl.arange(0, size(BLOCKS, b))
        for a in tl.static_range(b, len(BLOCKS)):
            i = first(BLOCKS, a) + tl.arange(0, size(BLOCKS, a))
            tl.store(out + i[:, None] * ROWS + j[None, :], summed[a - b])


def products(
    rows: Tensor, origin: Tensor | None = None, needed: Tensor | None = None
) -> Tensor:  # [C, D], [D], [] to [C, C] float64
    """<u_i - o, u_j - o>; they are 0, and nothing is read, if `needed` is False."""
    count, columns = rows.shape
    assert count <= MOST, f"{count} rows, and a program has room for {MOST}"
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    blocks = _blocks(count)
    width = sum(blocks[-1])
    if needed is None:
        needed = torch.ones((), dtype=torch.bool, device=rows.device)
    out = rows.new_empty(PROGRAMS, width, width, dtype=torch.float64)
    _products_kernel[(PROGRAMS,)](
        rows, rows if origin is None else origin, needed.to(torch.int32), out,
        count, columns, rows.stride(0), BLOCKS=blocks, ROWS=width, COLUMNS=COLUMNS, STAGES=STAGES,
        HAS_ORIGIN=origin is not None, num_warps=WARPS,
    )  # fmt: skip
    below = out.sum(0)[:count, :count].tril()
    return below + below.tril(-1).T


def _blocks(count: int) -> tuple[tuple[int, int], ...]:
    """As wide as there are rows for, the last with up to 15 that are not there."""
    found, start = [], 0
    while start < count:
        wide = WIDEST
        while wide > 16 and wide > count - start:
            wide //= 2
        found.append((start, wide))
        start += wide
    return tuple(found)
