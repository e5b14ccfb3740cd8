"""Nearest-neighbour mixing (Allouah et al., AISTATS 2023, arXiv:2302.01772), algorithm 2.

In place of each update stands the mean of the C - f that are nearest to it, itself included, and
the combination before it in the experiment is made of these means. So honest clients with
different data look more alike to it. Buffers, such as BatchNorm's statistics, are not mixed.
"""

from dataclasses import dataclass

import torch

from fedlens.algorithm import Algorithm, paper
from fedlens.algorithm.slots import Combine, Received
from fedlens.algorithms.before import Before, check_before, traced
from fedlens.algorithms.distances import squared_distances
from fedlens.algorithms.trust import Byzantine, params_of, with_byzantine
from fedlens.core import Memory, Tree


@dataclass(frozen=True)
class Mixing(Before, Byzantine):
    inner: Combine
    byzantine: int

    @property
    def fewest(self) -> int:
        return max(self.inner.fewest, self.byzantine + 1)

    def withstands(self, clients: int) -> int:
        inner = self.inner.withstands(clients)
        return self.byzantine if inner is None else min(inner, self.byzantine)

    def update(self, given: Received) -> tuple[Tree, Memory]:
        params, clients = params_of(given.updates, given.layout), len(given.shares)
        near = squared_distances(params).argsort(dim=1, stable=True)[:, : clients - self.byzantine]
        zeros = torch.zeros(clients, clients, dtype=torch.float64, device=given.shares.device)
        mixing = zeros.scatter(1, near, 1 / (clients - self.byzantine))
        mixed = {n: (mixing.to(u) @ u.flatten(1)).view_as(u) for n, u in params.items()}
        made, memory = self.inner.update(given._replace(updates=given.updates | mixed))
        return made, traced(memory, lambda trust: trust @ mixing.to(trust))


@paper
def nnm(base: Algorithm, byzantine: int = 1) -> Algorithm:
    """Average each client with those nearest to it, before a robust combination.

    Args:
        byzantine: f, how many clients of a round may be hostile.
    """
    check_before(base, "nnm")
    return with_byzantine(base, "nnm", Mixing(base.combine, byzantine))
