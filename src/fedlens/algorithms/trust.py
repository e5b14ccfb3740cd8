"""What robust combinations share that find out by themselves how much each client counts.

Their vectors u_i are updates of parameters. BatchNorm's statistics, which depend on the images and
are often far larger, do not show which clients are hostile. But then a hostile client whose
parameters lie near the others' could send any statistics. So of these the coordinate-wise median
over all clients is taken.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from fedlens.algorithm import Algorithm
from fedlens.algorithm.slots import Combine, Received
from fedlens.algorithms.columns import by_span
from fedlens.algorithms.median import middle
from fedlens.config.names import TRUST
from fedlens.core import Cohort, Memory, Tree
from fedlens.network.layout import Layout
from fedlens.storage.words import count_of


class Byzantine(Combine, Protocol):
    """Told that f clients of a round may be hostile, it needs `times` f + `more` clients."""

    byzantine: int  # f
    uses_shares: ClassVar[bool] = False
    reads_cohort: ClassVar[bool] = False
    times: ClassVar[int] = 2
    more: ClassVar[int] = 1

    @property
    def fewest(self) -> int:
        return self.times * self.byzantine + self.more

    def withstands(self, clients: int) -> int | None:
        return self.byzantine


class Trusting(Combine, Protocol):
    """The sum of trust times update.

    In the record an update that counts as in a plain mean is 1 / C, whoever has how many examples.
    """

    uses_shares: ClassVar[bool] = False
    reads_cohort: ClassVar[bool] = False

    def trust(self, params: Tree, shares: Tensor, cohort: Cohort) -> Tensor:  # [C]
        ...

    def update(self, given: Received) -> tuple[Tree, Memory]:
        params, shares = params_of(given.updates, given.layout), given.shares
        trust = self.trust(params, shares, given.cohort)
        count = trust / (shares * len(shares)).clamp(min=1e-300) if self.uses_shares else trust
        return {
            name: self.combined(u, trust) if name in params else middle(u)
            for name, u in given.updates.items()
        }, given.memory | {TRUST: {TRUST: count}}

    def combined(self, update: Tensor, trust: Tensor) -> Tensor:  # [C, ...] to [...]
        if update.device.type == "cpu" and trust.count_nonzero() == 1:
            one = int(trust.argmax())
            return update[one] * trust[one].to(update)
        made: Tensor = torch.tensordot(trust.to(update), update, 1)
        return made


def params_of(updates: Tree, layout: Layout) -> Tree:
    return {name: u for name, u in updates.items() if layout.entries[name].role != "buffer"}


CANCELS = 0.01
"""Less than this share of the squared norms that distances keep, and they are computed anew."""


def squared_distances(params: Tree) -> Tensor:  # [C, C]
    """||u_i - u_j||^2, from products.

    These cancel for long vectors that lie near each other. So for each tensor the origin is one of
    the updates, the one with the median norm: it is no longer than an honest one, if most are. A
    CPU does without as long as at least half of the updates lie far from it by their length.
    """
    found: Tensor | float = 0.0
    for u in params.values():
        rows = u.flatten(1)
        products = products_about(rows) if rows.device.type == "cpu" else None
        if products is None or _cancel(products):
            norms = torch.linalg.vector_norm(rows, dim=1)
            products = products_about(rows, rows.index_select(0, _middle(norms)))  # [1, D]
        squares = products.diagonal()
        found = found + (squares[:, None] + squares - 2 * products)
    assert isinstance(found, Tensor), "a model without parameters"
    return found.clamp(min=0).fill_diagonal_(0)


def _middle(norms: Tensor) -> Tensor:  # [C] to [1]
    return norms.argsort()[len(norms) // 2, None]


def _cancel(products: Tensor) -> bool:
    squares = products.diagonal()
    origin = int(_middle(squares))
    far = (squares + squares[origin] - 2 * products[origin]).sort().values
    return not bool(far[len(far) // 2] > CANCELS * squares[origin])


def products_about(
    rows: Tensor, origin: Tensor | None = None
) -> Tensor:  # [C, D], [1, D] to [C, C]
    """<u_i - o, u_j - o>; on a CPU, a quarter of them is that of others."""
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


def lengths_of(params: Tree) -> Tensor:  # [C]
    """||u_i||."""
    each = [torch.linalg.vector_norm(u.flatten(1), dim=1) for u in params.values()]
    lengths: Tensor = torch.linalg.vector_norm(torch.stack(each), dim=0)
    return lengths


def products_about_mean(squared: Tensor, weights: Tensor) -> Tensor:  # [C, C]
    """<u_i - m, u_j - m>, where m is the sum of weight times u, from squared distances.

    On the diagonal are the squared distances from m. The weights add up to 1.
    """
    from_mean = squared @ weights
    return (from_mean[:, None] + from_mean - squared - weights @ from_mean) / 2


def largest(matrix: Tensor) -> Tensor:  # [C]
    """The eigenvector, of length 1, of the largest eigenvalue of a matrix with none below 0.

    By powers of the matrix, as tensor code alone: up to the 256th.
    """
    for _ in range(8):
        matrix = matrix / matrix.diagonal().sum().clamp(min=1e-300)
        matrix = matrix @ matrix
    column = matrix.index_select(1, matrix.diagonal().argmax()[None]).squeeze(1)
    return F.normalize(column, dim=0, eps=1e-300)


def evenly(chosen: Tensor, clients: int) -> Tensor:  # [C]
    """Weights of the mean of the chosen clients, which are given by number."""
    zeros = torch.zeros(clients, dtype=torch.float64, device=chosen.device)
    return zeros.index_fill(0, chosen, 1 / len(chosen))


def with_byzantine(base: Algorithm, name: str, combine: Byzantine) -> Algorithm:
    """The algorithm with this combination; more hostile clients than fit are refused."""
    f, times, more = combine.byzantine, combine.times, combine.more
    clients = base.select.cohort_size
    if f < 0 or clients < times * f + more:
        raise ValueError(
            f"{name}: {count_of(f, 'hostile client')} among {clients} "
            f"{'is' if f == 1 else 'are'} too many: "
            f"choose at most {max((clients - more) // times, 0)}, or more clients a round"
        )
    return replace(base, combine=combine)
