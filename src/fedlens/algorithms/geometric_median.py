"""Geometric median (Pillutla, Kakade and Harchaoui, 2022, arXiv:1912.13445), smoothed Weiszfeld.

The point z with the least sum of distances to the updates u_i. In each step z is the sum of
w_i u_i, with w_i in proportion to 1 / max(||u_i - z||, smoothing), and the distances among the u_i
give those from z. At first the median distance of u_i from all stands for ||u_i - z||, so that it
does not matter how far away a minority is. The paper weighs by examples; here all count alike.
"""

import math
from dataclasses import dataclass, replace

from torch import Tensor

from fedlens.algorithm import Algorithm, paper
from fedlens.algorithms.distances import products_about_mean, squared_distances
from fedlens.algorithms.median import middle
from fedlens.algorithms.trust import Trusting
from fedlens.core import Cohort, Tree


@dataclass(frozen=True)
class GeometricMedian(Trusting):
    smoothing: float
    iterations: int

    def withstands(self, clients: int) -> int:
        return (clients - 1) // 2

    def trust(self, params: Tree, shares: Tensor, cohort: Cohort) -> Tensor:
        squared = squared_distances(params)
        away = middle(squared.sqrt())
        for step in range(self.iterations + 1):
            weights = 1 / away.clamp(min=self.smoothing)
            weights = weights / weights.sum()
            if step < self.iterations:
                away = products_about_mean(squared, weights).diagonal().clamp(min=0).sqrt()
        return weights


@paper
def geometric_median(base: Algorithm, smoothing: float = 1e-6, iterations: int = 8) -> Algorithm:
    """Take the point with the least sum of distances to the updates.

    Args:
        smoothing: nu, below which distances count as this one.
        iterations: Weiszfeld's steps of a round.
    """
    if not 0 < smoothing < math.inf:
        raise ValueError(f"geometric-median: smoothing is {smoothing}: choose above 0")
    if iterations < 1:
        raise ValueError(f"geometric-median: iterations is {iterations}: choose 1 or more")
    return replace(base, combine=GeometricMedian(smoothing, iterations))
