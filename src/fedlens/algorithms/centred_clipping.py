"""Centred clipping (Karimireddy et al., ICML 2021, arXiv:2012.10333), equation 1.

v = v + mean over the clients of (u_i - v) * min(1, radius / ||u_i - v||), some times over, from the
v of the last round on. A client can move v by at most radius / C, however far away its update is.
With a radius that nobody reaches it is the plain mean. Norms are those of all parameters together,
and products of the u_i - v give those of all iterations. Of buffers it takes the coordinate-wise
median, as `krum` does.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from fedlens.algorithm import Algorithm, at_least, paper
from fedlens.algorithm.slots import Combine, Received
from fedlens.algorithms.distances import products_about
from fedlens.algorithms.median import middle
from fedlens.config.names import TRUST
from fedlens.core import Memory, Number, Tree


@dataclass(frozen=True)
class CentredClipping(Combine):
    radius: Number
    iterations: int
    uses_shares: ClassVar[bool] = False
    reads_cohort: ClassVar[bool] = False

    def withstands(self, clients: int) -> int:
        return (clients - 1) // 2

    def init(self, params: Tree) -> Memory:
        return {"centre": {name: torch.zeros_like(p).double() for name, p in params.items()}}

    def update(self, given: Received) -> tuple[Tree, Memory]:
        updates, memory = given.updates, given.memory
        before = {name: v for name, v in memory["centre"].items() if name in updates}
        trust = self.trust({n: (updates[n].flatten(1), v.view(1, -1)) for n, v in before.items()})
        centre = {
            name: (1 - trust.sum()) * v + torch.tensordot(trust.to(v), updates[name].to(v), 1)
            for name, v in before.items()
        }
        buffers = {name: middle(u) for name, u in updates.items() if name not in centre}
        return centre | buffers, {"centre": memory["centre"] | centre, TRUST: {TRUST: trust}}

    def trust(self, places: Mapping[str, tuple[Tensor, Tensor]]) -> Tensor:  # [C]
        """w, such that the new v is the old one plus the sum of w_i times u_i - v."""
        products = torch.stack([products_about(u.double(), v) for u, v in places.values()]).sum(0)
        w = products.new_zeros(len(products))
        for _ in range(self.iterations):
            along = products @ w
            away = (products.diagonal() - 2 * along + w @ along).clamp(min=0).sqrt()
            factor = (self.radius / away.clamp(min=1e-300)).clamp(max=1)
            w = w * (1 - factor.mean()) + factor / len(w)
        return w


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
