"""FLTrust (Cao, Fang, Liu and Gong, NDSS 2021, arXiv:2012.13995).

The server has a few examples of its own, and an update u_0 that it trains on them as clients do:
they are those of the client `root`, which takes part in every round and is never hostile. With
t_i = max(0, cos(u_i, u_0)) the update is the sum of t_i u_i ||u_0|| / ||u_i||, divided by the sum
of the t_i. So clients count by how much they agree with the server, and all are as long as u_0.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from fedlens.algorithm import Algorithm, paper
from fedlens.algorithm.slots import Select
from fedlens.algorithms.trust import Trusting, lengths_of
from fedlens.core import Cohort, Tree
from fedlens.core.federation import Federation
from fedlens.core.trees import moved


@dataclass(frozen=True)
class WithRoot(Select):
    """One client in every round, and others as `inner` draws them."""

    inner: Select
    root: int

    @property
    def cohort_size(self) -> int:
        return self.inner.cohort_size

    def of_size(self, count: int) -> Select:
        return replace(self, inner=self.inner.of_size(count))

    def check(self, num_clients: int) -> None:
        if self.root >= num_clients:
            raise ValueError(f"fltrust: root is {self.root}: choose 0 to {num_clients - 1}")

    def __call__(self, federation: Federation, round: int, key: Tensor) -> Tensor:  # [C]
        self.check(federation.num_clients)
        drawn = self.inner(federation, round, key)
        others = drawn[drawn != self.root][: len(drawn) - 1]
        return torch.cat([torch.tensor([self.root]), others])


@dataclass(frozen=True)
class ByRoot(Trusting):
    """The root is no client of its own: it counts as 0."""

    root: int
    reads_cohort: ClassVar[bool] = True

    @property
    def fewest(self) -> int:
        return 2

    def withstands(self, clients: int) -> int:
        return clients - 1

    def trust(self, params: Tree, shares: Tensor, cohort: Cohort) -> Tensor:
        is_root = moved((cohort.clients == self.root).double(), shares.device)
        along = torch.zeros_like(is_root)
        for u in params.values():
            rows = u.flatten(1)
            along += rows @ (is_root.to(u) @ rows)
        length = lengths_of(params).clamp(min=1e-300)
        by_root = is_root @ length
        agrees = (along / length / by_root.clamp(min=1e-300)).clamp(min=0) * (1 - is_root)
        trust: Tensor = agrees / agrees.sum().clamp(min=1e-300) * by_root / length
        return trust


@paper
def fltrust(base: Algorithm, root: int = 0) -> Algorithm:
    """Count clients by how much they agree with examples that the server trusts.

    Args:
        root: the number of the client that holds them.
    """
    if root < 0:
        raise ValueError(f"fltrust: root is {root}: choose the number of a client")
    if base.select.cohort_size < 2:
        raise ValueError("fltrust: the root alone takes part: let more clients take part")
    return replace(base, select=WithRoot(base.select, root), combine=ByRoot(root))
