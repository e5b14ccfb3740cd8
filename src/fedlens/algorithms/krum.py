"""Krum and Multi-Krum (Blanchard et al., NeurIPS 2017, arXiv:1703.02757).

A client's score is the sum of squared distances to the C - f - 2 updates nearest to its own; the
update is that of the client with the least score or, for Multi-Krum, the mean of the `keep` best.
It needs C > 2 f + 2. It ignores how many examples clients hold.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedlens.algorithm import Algorithm, paper
from fedlens.algorithms.distances import squared_distances
from fedlens.algorithms.trust import Byzantine, Trusting, evenly, with_byzantine
from fedlens.core import Cohort, Tree


@dataclass(frozen=True)
class Krum(Byzantine, Trusting):
    byzantine: int
    keep: int
    more: ClassVar[int] = 3

    @property
    def fewest(self) -> int:
        return max(super().fewest, self.keep)

    def trust(self, params: Tree, shares: Tensor, cohort: Cohort) -> Tensor:
        squared = squared_distances(params).fill_diagonal_(torch.inf)
        nearest = squared.sort(1).values[:, : len(squared) - self.byzantine - 2]
        best = nearest.sum(1).argsort(stable=True)[: self.keep]
        return evenly(best, len(squared))

    def combined(self, update: Tensor, trust: Tensor) -> Tensor:
        if self.keep > 1:
            return super().combined(update, trust)
        return update.index_select(0, trust.argmax()[None])[0]  # without reading the others


@paper
def krum(base: Algorithm, byzantine: int = 1, keep: int = 1) -> Algorithm:
    """Trust the updates that lie among others.

    Args:
        byzantine: f, how many clients of a round may be hostile.
        keep: how many of the best are averaged; 1 is Krum, more is Multi-Krum.
    """
    made = with_byzantine(base, "krum", Krum(byzantine, keep))
    if not 1 <= keep <= base.select.cohort_size:
        raise ValueError(f"krum: keep is {keep}: choose 1 to {base.select.cohort_size}")
    return made
