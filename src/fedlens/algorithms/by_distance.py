"""Defences that leave clients out, and need of their updates only how far apart they are.

u_i are the C updates, and f is how many may be hostile. How many examples clients hold plays no
role. MDA: El-Mhamdi et al., PODC 2020. CAF: Allouah et al., ICML 2025. DnC: Shejwalkar and
Houmansadr, NDSS 2021; on all coordinates, not on a random part of them, since distances are cheap.
"""

import functools
import itertools
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fedlens.algorithm import Algorithm, paper
from fedlens.algorithms.distances import products_about_mean, squared_distances
from fedlens.algorithms.trust import Byzantine, Trusting, evenly, largest, with_byzantine
from fedlens.core import Cohort, Tree
from fedlens.core.trees import moved
from fedlens.storage.words import count_of

MOST_SUBSETS = 100_000  # of clients that `mda` compares


@dataclass(frozen=True)
class SmallestDiameter(Byzantine, Trusting):
    """The mean of those C - f updates whose largest distance is least.

    If several sets have that diameter, as those that differ in an inner point do, it is the one
    with the least sum of squared distances.
    """

    byzantine: int

    def trust(self, params: Tree, shares: Tensor, cohort: Cohort) -> Tensor:
        squared = squared_distances(params)
        sets = moved(_all_but(len(squared), self.byzantine), squared.device)
        inside = [
            torch.where(s[:, :, None] & s[:, None], squared, 0.0) for s in torch.split(sets, 2048)
        ]
        diameter = torch.cat([one.amax((1, 2)) for one in inside])
        spread = torch.cat([one.sum((1, 2)) for one in inside])
        best = torch.where(diameter == diameter.min(), spread, torch.inf).argmin()
        return F.normalize(sets.index_select(0, best[None])[0].double(), 1, 0)


@functools.cache
def _all_but(clients: int, left_out: int) -> Tensor:  # [S, C] bool
    """All sets of clients without this many of them."""
    out = torch.tensor([*itertools.combinations(range(clients), left_out)], dtype=torch.int64)
    return torch.ones(len(out), clients, dtype=torch.bool).scatter(1, out, False)


@paper
def mda(base: Algorithm, byzantine: int = 1) -> Algorithm:
    """Average the subset of clients with the smallest diameter (El-Mhamdi et al., 2020).

    Args:
        byzantine: f, how many clients of a round may be hostile.
    """
    made = with_byzantine(base, "mda", SmallestDiameter(byzantine))
    clients = base.select.cohort_size
    if (sets := math.comb(clients, byzantine)) > MOST_SUBSETS:
        raise ValueError(
            f"mda compares {sets:,} subsets for {count_of(byzantine, 'hostile client')} among "
            f"{clients}, and at most {MOST_SUBSETS:,} are feasible: choose caf, or fewer clients "
            "a round"
        )
    return made


@dataclass(frozen=True)
class CovarianceFilter(Byzantine, Trusting):
    """Means with weights c_i, of which the one with the least largest variance is taken.

    c = 1 at first. v is the direction in which the weighted updates vary most, around their mean
    m: c_i = c_i (1 - t_i / max t), t_i = <u_i - m, v>^2, until the c_i add up to C - 2 f or less.
    Each time at least one client is left out, so 2 f times are enough.
    """

    byzantine: int

    def trust(self, params: Tree, shares: Tensor, cohort: Cohort) -> Tensor:
        squared = squared_distances(params)
        clients = len(squared)
        c = squared.new_ones(clients)
        least, best = squared.new_full((), torch.inf), c / clients
        for _ in range(2 * self.byzantine):
            goes_on = c.sum() > clients - 2 * self.byzantine
            share = c / c.sum().clamp(min=1e-300)
            about, root = products_about_mean(squared, share), share.sqrt()
            v = largest(root[:, None] * about * root)
            along = (about @ (root * v)).square()  # t times the variance along v
            variance = (root * v) @ about @ (root * v)
            better = goes_on & (variance < least)
            least, best = torch.where(better, variance, least), torch.where(better, share, best)
            c = torch.where(goes_on, c * (1 - along / along.max().clamp(min=1e-300)), c)
        return best


@paper
def caf(base: Algorithm, byzantine: int = 1) -> Algorithm:
    """Let clients count less along whose updates all vary most (Allouah et al., 2025).

    Args:
        byzantine: f, how many clients of a round may be hostile.
    """
    return with_byzantine(base, "caf", CovarianceFilter(byzantine))


@dataclass(frozen=True)
class DivideAndConquer(Byzantine, Trusting):
    """The mean of the C - f clients with the least <u_i - m, v>^2, v as in `CovarianceFilter`."""

    byzantine: int

    def trust(self, params: Tree, shares: Tensor, cohort: Cohort) -> Tensor:
        squared = squared_distances(params)
        clients = len(squared)
        equal = squared.new_full((clients,), 1 / clients)
        away = largest(products_about_mean(squared, equal)).square()
        return evenly(away.argsort(stable=True)[: clients - self.byzantine], clients)


@paper
def dnc(base: Algorithm, byzantine: int = 1) -> Algorithm:
    """Leave out the clients farthest along the direction of most variance (Shejwalkar, 2021).

    Args:
        byzantine: f, how many clients of a round may be hostile.
    """
    return with_byzantine(base, "dnc", DivideAndConquer(byzantine))
