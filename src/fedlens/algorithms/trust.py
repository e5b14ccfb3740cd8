"""What robust combinations share that find out by themselves how much each client counts.

Their vectors u_i are updates of parameters. BatchNorm's statistics, which depend on the images and
are often far larger, do not show which clients are hostile. But then a hostile client whose
parameters lie near the others' could send any statistics. So of these the coordinate-wise median
over all clients is taken.
"""

from dataclasses import replace
from typing import ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from fedlens.algorithm import Algorithm
from fedlens.algorithm.slots import Combine, Received
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
        made: Tensor = torch.tensordot(trust.to(update), update, 1)
        return made


def params_of(updates: Tree, layout: Layout) -> Tree:
    return {name: u for name, u in updates.items() if layout.entries[name].role != "buffer"}


def lengths_of(params: Tree) -> Tensor:  # [C]
    """||u_i||."""
    each = [torch.linalg.vector_norm(u.flatten(1), dim=1) for u in params.values()]
    lengths: Tensor = torch.linalg.vector_norm(torch.stack(each), dim=0)
    return lengths


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
