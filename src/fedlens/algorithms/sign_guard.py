"""SignGuard (Xu, Huang, Song and Lan, ICDCS 2022, arXiv:2109.05872).

Clients whose norm is not within `low` to `high` times the median norm are left out. The others are
described by three shares: of coordinates above, equal to and below 0. The largest cluster of these,
by mean shift, is kept. What it sent is shortened to the median norm, and averaged. Of the paper it
leaves out that shares are of a tenth of the coordinates, drawn anew in each round: here, of all.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedlens.algorithm import Algorithm, paper
from fedlens.algorithms.median import middle
from fedlens.algorithms.norm_bound import shrinking
from fedlens.algorithms.trust import Trusting, lengths_of
from fedlens.core import Cohort, Tree

SHIFTS = 20  # after which the points of a few clusters stay where they are


@dataclass(frozen=True)
class SignGuard(Trusting):
    low: float
    high: float

    def withstands(self, clients: int) -> int:
        return (clients - 1) // 2

    def trust(self, params: Tree, shares: Tensor, cohort: Cohort) -> Tensor:
        lengths = lengths_of(params)
        relative = lengths / middle(lengths).clamp(min=1e-300)
        fits = (relative >= self.low) & (relative <= self.high)
        kept = fits & largest_cluster(sign_shares(params))
        kept = torch.where(kept.any(), kept, fits).double()
        return kept / kept.sum().clamp(min=1) * shrinking(lengths)


def sign_shares(params: Tree) -> Tensor:  # [C, 3]
    """How many of a client's coordinates are above, equal to and below 0, as shares."""
    above: Tensor | int = 0
    below: Tensor | int = 0
    count = 0
    for u in params.values():
        rows = u.flatten(1)
        above, below = above + (rows > 0).sum(1), below + (rows < 0).sum(1)
        count += rows.shape[1]
    assert isinstance(above, Tensor) and isinstance(below, Tensor), "a model without parameters"
    return torch.stack([above, count - above - below, below], 1).double() / count


def largest_cluster(points: Tensor) -> Tensor:  # [C, D] to [C] bool
    """Mean shift: each point moves to the mean of those near it; the ends that most share.

    Near is what half of the distances to other points are below, on average.
    """
    distances = torch.cdist(points, points)
    near = middle(distances).mean() + 1e-9
    ends = points
    for _ in range(SHIFTS):
        weights = (torch.cdist(ends, points) <= near).to(points)
        ends = weights @ points / weights.sum(1, keepdim=True).clamp(min=1)
    alike = torch.cdist(ends, ends) <= near / 2
    return alike.index_select(0, alike.sum(1).argmax()[None]).squeeze(0)


@paper
def sign_guard(base: Algorithm, low: float = 0.1, high: float = 3.0) -> Algorithm:
    """Leave out clients of unusual length, or with unusual shares of signs.

    Args:
        low: the shortest that is kept, in median norms.
        high: the longest.
    """
    if not 0 <= low <= 1 <= high:
        raise ValueError(f"sign-guard: low is {low:g} and high {high:g}: choose low ≤ 1 ≤ high")
    return replace(base, combine=SignGuard(low, high))
