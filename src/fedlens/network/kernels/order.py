"""Triton kernels that sort clients' values: means of those in the middle, coordinate by coordinate.

A thread takes a coordinate. It reads the value of each client once, and all of them stay in its
registers while they are compared: by Batcher's merge exchange, without what the result does not
depend on. A program is compiled for one number of clients.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from fedlens.network.kernels.launch import launchable

MOST = 128  # clients: so many float64 numbers fill a thread's registers
WARPS = 4  # of a program; a thread of it has one coordinate


@triton.constexpr_function
def between(clients, cut):
    """What becomes of each place in order: 1 is summed, 0 is not."""
    return tuple(int(cut <= place < clients - cut) for place in range(clients))


@triton.constexpr_function
def lowest(clients, keep):
    """Where the lowest window of `keep` places begins, of those with the middle place in them."""
    return max((clients - 1) // 2 - keep + 1, 0)


@triton.constexpr_function
def highest(clients, keep):
    return min((clients - 1) // 2, clients - keep)


@triton.constexpr_function
def around(clients, keep):
    """As `between`; places that are looked at one by one have numbers of their own."""
    low, high = lowest(clients, keep), highest(clients, keep)
    uses = [int(high <= place < low + keep) for place in range(clients)]
    one_by_one = {(clients - 1) // 2, clients // 2, *range(low, high)}
    for place in one_by_one | {place + keep for place in range(low, high)}:
        uses[place] = 2 + place
    return tuple(uses)


@triton.constexpr_function
def exchanges(uses):
    """Pairs of places to be put in order, one after the other, until all are where they are used.

    Those whose two results are used alike are left out (Knuth, volume 3, algorithm 5.2.2M).
    """
    count, pairs = len(uses), []
    top = 1 << max((count - 1).bit_length() - 1, 0)
    p = top
    while p > 0:
        q, r, d = top, 0, p
        while True:
            pairs += [(i, i + d) for i in range(count - d) if i & p == r]
            if q == p:
                break
            d, q, r = q - p, q >> 1, p
        p >>= 1
    used, kept = [*uses], []
    for a, b in reversed(pairs):
        if used[a] != used[b]:
            kept.append((a, b))
            used[a], used[b] = -2 * len(kept), -2 * len(kept) - 1
    return tuple(reversed(kept))


def _exchanged(values: Any, pairs: Any, _semantic: Any = None) -> tuple[Any, ...]:
    """The values, a tensor for each place, after the exchanges.

    Triton calls it while it compiles, as a word of its language: the same as source would take it
    minutes to read. Its interpreter calls it as it is.
    """
    x, given = [*values], {} if _semantic is None else {"_semantic": _semantic}
    for a, b in getattr(pairs, "value", pairs):
        swap = x[b].__lt__(x[a], **given)
        x[a], x[b] = tl.where(swap, x[b], x[a], **given), tl.where(swap, x[a], x[b], **given)
    return tuple(x)


_exchanged.__triton_builtin__ = True  # type: ignore[attr-defined]


@triton.jit
def _apart(tile):
    """The columns of a tile, a power of two, each as a tensor; their order is another one."""
    if tile.shape[1] == 1:
        apart = (tl.reshape(tile, (tile.shape[0],)),)
    else:
        even, odd = tl.split(tl.reshape(tile, (tile.shape[0], tile.shape[1] // 2, 2)))
        apart = _apart(even) + _apart(odd)
    return apart


@triton.jit
def _loaded(rows, i, columns, by_row, CLIENTS: tl.constexpr):
    """Column i of `rows`, a tensor for each client.

    It loads as many rows together as it can: for each load, Triton looks at all that follows.
    """
    x = ()
    for power in tl.static_range(7, -1, -1):
        if CLIENTS & (1 << power):
            c = (CLIENTS >> (power + 1) << (power + 1)) + tl.arange(0, 1 << power)
            at = rows + c.to(tl.int64)[None, :] * by_row + i[:, None]
            x += _apart(tl.load(at, mask=(i < columns)[:, None], other=0.0))
    return x


@launchable(do_not_specialize_on_alignment=["rows", "by_row"])
def _between_kernel(
    rows, out, columns, by_row, CLIENTS: tl.constexpr, CUT: tl.constexpr, BLOCK: tl.constexpr
):
    """out[i] = the mean of column i of `rows` without its CUT smallest and CUT largest values."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = _loaded(rows, i, columns, by_row, CLIENTS)
    x = _exchanged(x, exchanges(between(CLIENTS, CUT)))
    total = x[CUT]
    for c in tl.static_range(CUT + 1, CLIENTS - CUT):
        total += x[c]
    tl.store(out + i, total / (CLIENTS - 2 * CUT), mask=i < columns)


@launchable(do_not_specialize_on_alignment=["rows", "by_row"])
def _around_kernel(
    rows, out, columns, by_row, near,
    CLIENTS: tl.constexpr, KEEP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out[i] = the mean of the KEEP values of column i of `rows` that are nearest to its median."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = _loaded(rows, i, columns, by_row, CLIENTS)
    x = _exchanged(x, exchanges(around(CLIENTS, KEEP)))
    twice = x[(CLIENTS - 1) // 2] + x[CLIENTS // 2]  # the median
    total = tl.zeros((BLOCK,), out.dtype.element_ty)
    for c in tl.static_range(highest(CLIENTS, KEEP), lowest(CLIENTS, KEEP) + KEEP):
        total += x[c]
    for c in tl.static_range(lowest(CLIENTS, KEEP), highest(CLIENTS, KEEP)):
        alike = near * tl.maximum(tl.abs(x[c]), tl.abs(x[c + KEEP]))
        total += tl.where(x[c] + x[c + KEEP] < twice - alike, x[c + KEEP], x[c])
    tl.store(out + i, total / KEEP, mask=i < columns)


def mean_between(rows: Tensor, cut: int) -> Tensor:  # [C, D] to [D]
    """The mean of each column without its `cut` smallest and `cut` largest values."""
    rows, out, programs = _placed(rows)
    _between_kernel[programs](
        rows, out, rows.shape[1], rows.stride(0),
        CLIENTS=len(rows), CUT=cut, BLOCK=32 * WARPS, num_warps=WARPS,
    )  # fmt: skip
    return out


def mean_around(rows: Tensor, keep: int, near: float) -> Tensor:  # [C, D] to [D]
    """The mean of those `keep` values of each column that are nearest to its median.

    Of two whose distances from it differ by less than `near` times the larger, the lower one.
    """
    rows, out, programs = _placed(rows)
    _around_kernel[programs](
        rows, out, rows.shape[1], rows.stride(0), near,
        CLIENTS=len(rows), KEEP=keep, BLOCK=32 * WARPS, num_warps=WARPS,
    )  # fmt: skip
    return out


def _placed(rows: Tensor) -> tuple[Tensor, Tensor, tuple[int]]:
    """Rows as the kernels read them, room for a result, and the number of programs."""
    clients, columns = rows.shape
    assert clients <= MOST, f"{clients} clients, and threads have room for {MOST}"
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    return rows, rows.new_empty(columns), (triton.cdiv(columns, 32 * WARPS),)
