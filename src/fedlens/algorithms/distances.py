"""How far updates lie from each other, which is all that some robust combinations look at."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fedlens.algorithms.columns import by_span
from fedlens.core import Tree
from fedlens.network.ops import by_kernels, products_of_rows

CANCELS = 0.01
"""Less than this share of the squared norms that distances keep, and they are computed anew."""


def squared_distances(params: Tree) -> Tensor:  # [C, C]
    """||u_i - u_j||^2, from products.

    These cancel for long vectors that lie near each other. So for each tensor the origin is one of
    the updates, the one with the median norm: it is no longer than an honest one, if most are. It
    may stay 0 as long as at least half of the updates lie far from that one by their length.
    """
    found: Tensor | float = 0.0
    for u in params.values():
        products = _that_do_not_cancel(u.flatten(1))
        squares = products.diagonal()
        found = found + (squares[:, None] + squares - 2 * products)
    assert isinstance(found, Tensor), "a model without parameters"
    return found.clamp(min=0).fill_diagonal_(0)


def _that_do_not_cancel(rows: Tensor) -> Tensor:  # [C, D] to [C, C]
    takes_kernels = by_kernels(rows)
    if not (takes_kernels or rows.device.type == "cpu"):
        norms = torch.linalg.vector_norm(rows, dim=1)
        return products_about(rows, rows.index_select(0, _middle(norms)))  # [1, D]
    products = products_about(rows)
    squares = products.diagonal()
    middle = _middle(squares)
    square, along = squares.index_select(0, middle), products.index_select(0, middle)[0]
    far = (squares + square - 2 * along).sort().values
    cancel = ~(far[len(far) // 2] > CANCELS * square[0])
    if not takes_kernels:
        return products_about(rows, rows.index_select(0, middle)) if cancel else products
    # A GPU does not wait to know: if it is not needed, the kernel reads nothing.
    anew = products_of_rows(rows, rows.index_select(0, middle)[0], cancel)
    return torch.where(cancel, anew.to(rows.dtype), products)


def _middle(norms: Tensor) -> Tensor:  # [C] to [1]
    return norms.argsort()[len(norms) // 2, None]


def products_about(
    rows: Tensor, origin: Tensor | None = None
) -> Tensor:  # [C, D], [1, D] to [C, C]
    """<u_i - o, u_j - o>; on a CPU, a quarter of them is that of others."""
    if by_kernels(rows):
        return products_of_rows(rows, None if origin is None else origin[0]).to(rows.dtype)
    half = len(rows) // 2 if rows.device.type == "cpu" else 0

    def some(pieces: Sequence[slice]) -> Tensor:
        products = rows.new_zeros(len(rows), len(rows))
        first, last = products[:half, :half], products[half:]
        for piece in pieces:
            away = rows[:, piece] if origin is None else rows[:, piece] - origin[:, piece]
            if half:
                first.addmm_(away[:half], away[:half].T)
            last.addmm_(away[half:], away.T)
        products[:half, half:] = last[:, :half].T
        return products

    return torch.stack(by_span(rows, some, 4 if origin is None else 1)).sum(0)


def products_about_mean(squared: Tensor, weights: Tensor) -> Tensor:  # [C, C]
    """<u_i - m, u_j - m>, where m is the sum of weight times u, from squared distances.

    On the diagonal are the squared distances from m. The weights add up to 1.
    """
    from_mean = squared @ weights
    return (from_mean[:, None] + from_mean - squared - weights @ from_mean) / 2
