"""Bulyan (El Mhamdi, Guerraoui and Rouault, ICML 2018, arXiv:1802.07927), on Krum.

Krum chooses C - 2 f clients, one after another, each among those that are left; of equals, the one
with the least sum of squared distances to all. Of each coordinate, those C - 4 f of the chosen
values are averaged that are nearest to their median. It needs C > 4 f + 2.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedlens.algorithm import Algorithm, paper
from fedlens.algorithms.distances import squared_distances
from fedlens.algorithms.meamed import around_median
from fedlens.algorithms.trust import Byzantine, Trusting, with_byzantine
from fedlens.core import Cohort, Tree


@dataclass(frozen=True)
class Bulyan(Byzantine, Trusting):
    byzantine: int
    times: ClassVar[int] = 4
    more: ClassVar[int] = 3

    def trust(self, params: Tree, shares: Tensor, cohort: Cohort) -> Tensor:
        every = squared_distances(params)
        squared, clients = every.clone().fill_diagonal_(torch.inf), len(every)
        free = torch.ones(clients, dtype=torch.bool, device=every.device)
        for left in range(clients, 2 * self.byzantine, -1):
            nearest = squared.sort(1).values[:, : max(left - self.byzantine - 2, 1)].sum(1)
            score = torch.where(free, nearest.clamp(max=1e300), torch.inf)
            # Two that are nearest to each other have the same score, but for rounding.
            equal = score <= score.min() * (1 + 1e-9)
            best = torch.where(equal, every.sum(1), torch.inf).argmin()[None]
            free = free.index_fill(0, best, False)
            squared = squared.index_fill(1, best, torch.inf)
        return (~free).double() / (clients - 2 * self.byzantine)

    def combined(self, update: Tensor, trust: Tensor) -> Tensor:
        keep = len(update) - 2 * self.byzantine
        chosen = update.index_select(0, trust.argsort(descending=True, stable=True)[:keep])
        return around_median(chosen, keep - 2 * self.byzantine)


@paper
def bulyan(base: Algorithm, byzantine: int = 1) -> Algorithm:
    """Choose clients by Krum, and average what is near the median of those.

    Args:
        byzantine: f, how many clients of a round may be hostile.
    """
    return with_byzantine(base, "bulyan", Bulyan(byzantine))
