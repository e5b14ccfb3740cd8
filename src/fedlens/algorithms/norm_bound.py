"""Bounded norms (Sun, Kairouz, Suresh and McMahan, 2019, arXiv:1911.07963), at the server.

The update is the sum of s_i u_i min(1, norm / ||u_i||), with the shares s_i of a plain mean. It
differs from `clip` in who clips: a hostile client does not. With a norm that nobody reaches it is
the plain mean. Without one, it is the median of the round's.
"""

import math
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from fedlens.algorithm import Algorithm, paper
from fedlens.algorithms.median import middle
from fedlens.algorithms.trust import Trusting, lengths_of
from fedlens.core import Cohort, Tree


@dataclass(frozen=True)
class NormBound(Trusting):
    norm: float | None
    uses_shares: ClassVar[bool] = True

    def trust(self, params: Tree, shares: Tensor, cohort: Cohort) -> Tensor:
        return shares * shrinking(lengths_of(params), self.norm)


def shrinking(lengths: Tensor, most: float | None = None) -> Tensor:  # [C]
    """The factors that make updates no longer than `most`, or than their median length."""
    bound = middle(lengths) if most is None else most
    return (bound / lengths.clamp(min=1e-300)).clamp(max=1)


@paper
def norm_bound(base: Algorithm, norm: float | None = None) -> Algorithm:
    """Shorten what is longer than a bound, whoever sent it.

    Args:
        norm: the bound; without it, the median norm of the round.
    """
    if norm is not None and not 0 < norm < math.inf:
        raise ValueError(f"norm-bound: norm is {norm:g}: choose above 0")
    return replace(base, combine=NormBound(norm))
