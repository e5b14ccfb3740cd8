"""Krum and Multi-Krum (Blanchard et al., NeurIPS 2017, arXiv:1703.02757).

A client's score is the sum of squared distances to the C - f - 2 updates nearest to its own; the
update is that of the client with the least score or, for Multi-Krum, the mean of the `keep` best.
It needs C > 2 f + 2. It ignores how many examples clients hold.

The paper's vectors are gradients. So distances are those of parameters: BatchNorm's statistics,
which depend on the images and are often far larger, do not show which clients are hostile. But then
a hostile client with parameters near the others' could send any statistics. So these are the
coordinate-wise median over all clients.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from fedlens.algorithm import Algorithm, paper
from fedlens.algorithm.slots import Combine
from fedlens.algorithms.median import middle
from fedlens.core import Cohort, Tree
from fedlens.network.layout import Layout


@dataclass(frozen=True)
class Krum(Combine):
    byzantine: int
    keep: int
    uses_shares: ClassVar[bool] = False
    reads_cohort: ClassVar[bool] = False

    @property
    def fewest(self) -> int:
        return max(2 * self.byzantine + 3, self.keep)

    def __call__(self, updates: Tree, shares: Tensor, cohort: Cohort, layout: Layout) -> Tree:
        params = {n: u for n, u in updates.items() if layout.entries[n].role != "buffer"}
        flat = torch.cat([u.flatten(1) for u in params.values()], 1)
        # From differences, not by |a|^2 + |b|^2 - 2ab, which cancels for similar updates.
        squared = torch.stack([(flat - one).square().sum(1) for one in flat])  # [C, C]
        squared.fill_diagonal_(torch.inf)
        nearest = squared.sort(1).values[:, : len(flat) - self.byzantine - 2]
        best = nearest.sum(1).argsort(stable=True)[: self.keep]
        return {n: u[best].mean(0) if n in params else middle(u) for n, u in updates.items()}


@paper
def krum(base: Algorithm, byzantine: int = 1, keep: int = 1) -> Algorithm:
    """Trust the updates that lie among others.

    Args:
        byzantine: f, how many clients of a round may be hostile.
        keep: how many of the best are averaged; 1 is Krum, more is Multi-Krum.
    """
    clients = base.select.cohort_size
    if byzantine < 0 or clients <= 2 * byzantine + 2:
        raise ValueError(
            f"krum: {byzantine} hostile clients among {clients} are too many: "
            f"choose at most {max((clients - 3) // 2, 0)}, or more clients a round"
        )
    if not 1 <= keep <= clients:
        raise ValueError(f"krum: keep is {keep}: choose 1 to {clients}")
    return replace(base, combine=Krum(byzantine, keep))
