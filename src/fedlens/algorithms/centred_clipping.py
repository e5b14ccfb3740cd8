"""Centred clipping (Karimireddy et al., ICML 2021, arXiv:2012.10333), equation 1.

v = v + mean over the clients of (u_i - v) * min(1, radius / ||u_i - v||), some times over, from the
v of the last round on. A client can move v by at most radius / C, however far away its update is.
With a radius that nobody reaches it is the plain mean. Norms are those of all parameters together;
of buffers it takes the coordinate-wise median, as `krum` does.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from fedlens.algorithm import Algorithm, at_least, paper
from fedlens.algorithm.slots import Combine
from fedlens.algorithms.median import middle
from fedlens.core import Cohort, Memory, Number, Tree, per_row, squared_norm
from fedlens.network.layout import Layout


@dataclass(frozen=True)
class CentredClipping(Combine):
    radius: Number
    iterations: int
    uses_shares: ClassVar[bool] = False
    reads_cohort: ClassVar[bool] = False

    def init(self, params: Tree) -> Memory:
        return {"centre": {name: torch.zeros_like(p).double() for name, p in params.items()}}

    def update(
        self,
        updates: Tree,
        shares: Tensor,
        cohort: Cohort,
        layout: Layout,
        memory: Memory,
        key: Tensor,
    ) -> tuple[Tree, Memory]:
        centre = {name: v for name, v in memory["centre"].items() if name in updates}
        for _ in range(self.iterations):
            away = {name: updates[name] - v for name, v in centre.items()}
            length = squared_norm(away).sqrt()  # [C]
            factor = (self.radius / length.clamp(min=1e-300)).clamp(max=1)
            centre = {
                name: v + (away[name] * per_row(factor, away[name])).mean(0)
                for name, v in centre.items()
            }
        buffers = {name: middle(u) for name, u in updates.items() if name not in centre}
        return centre | buffers, {"centre": memory["centre"] | centre}


@paper
def centred_clipping(base: Algorithm, radius: Number = 10.0, iterations: int = 1) -> Algorithm:
    """Move from the last round's update by what clients differ from it, each by little.

    Args:
        radius: tau, how far from it an update counts in full.
        iterations: how often it is done in a round.
    """
    at_least(radius, 1e-12, "centred-clipping: radius")
    if iterations < 1:
        raise ValueError(f"centred-clipping: iterations is {iterations}: choose 1 or more")
    return replace(base, combine=CentredClipping(radius, iterations))
