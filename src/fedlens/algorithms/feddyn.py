"""FedDyn (Acar et al., ICLR 2021, arXiv:2111.04263), algorithm 1: dynamic regularisation.

A client minimises f_k(w) - <h_k, w> + (alpha / 2) ||w - x||^2 and then sets h_k = h_k - alpha (w_k
- x), which at its minimum is its own gradient there. The server keeps h = h - (alpha / m) sum over
the cohort of (w_k - x), m counting ALL clients, and moves to mean(w_k) - h / alpha. At a fixed
point all clients agree, and the gradients sum to zero.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedlens.algorithm import Algorithm, at_least, paper
from fedlens.algorithm.pieces import Equally, Sgd, difference
from fedlens.algorithm.slots import Advance, Drift, Penalty
from fedlens.core import (
    Gathered,
    Local,
    Memory,
    Moved,
    Number,
    Tree,
    Upload,
    per_row,
    squared_distance,
    zeros_at_first,
    zeros_like,
)


def minus_gradient(local: Local, name: str) -> Tensor:
    return -local.memory["gradient"][name]


@dataclass(frozen=True)
class Dynamic(Penalty):
    """- <h_k, w> + (alpha / 2) ||w - x||^2"""

    alpha: Number

    @property
    def pull(self) -> Number:
        return self.alpha

    @property
    def drift(self) -> Drift:
        return minus_gradient

    def __call__(self, local: Local) -> Tensor:  # [C]
        h = local.memory["gradient"]
        inner = [(h[name] * w).flatten(1).sum(1) for name, w in local.params.items()]
        near = squared_distance(local.params, local.anchor)
        return self.alpha / 2 * near - torch.stack(inner).sum(0)


@dataclass(frozen=True)
class KeepGradient:
    alpha: Number

    def __call__(self, local: Local) -> Upload:
        h = {
            name: own - per_row(self.alpha, own) * (local.params[name] - local.anchor[name])
            for name, own in local.memory["gradient"].items()
        }
        return replace(difference(local), keep={"gradient": h})


@dataclass(frozen=True)
class Corrective(Advance):
    alpha: Number

    def init(self, params: Tree) -> Memory:
        return {"h": zeros_like(params)}

    def update(self, grads: Tree, memory: Memory, params: Tree, gathered: Gathered) -> Moved:
        part = len(gathered.cohort.clients) / gathered.cohort.num_clients
        h, moved = {}, {}
        for name, p in params.items():
            mean = -grads[name]  # of w_k - x over the cohort
            alpha = per_row(self.alpha, p)
            h[name] = memory["h"][name] - alpha * part * mean
            moved[name] = p + mean - h[name] / alpha
        return moved, {"h": h}


@paper
def feddyn(base: Algorithm, alpha: Number = 0.01) -> Algorithm:
    """Make the clients' own minima agree with everybody's.

    Args:
        alpha: how hard clients are held; the larger, the slower and the safer.
    """
    at_least(alpha, 1e-12, "feddyn: alpha")
    if isinstance(base.advance, Sgd) and base.advance.lr != 1.0:
        raise ValueError("feddyn has its own server step: leave server.lr out")
    return replace(
        base,
        objective=base.objective.plus(Dynamic(alpha)),
        upload=KeepGradient(alpha),
        weigh=Equally(),
        advance=Corrective(alpha),
        memory={**base.memory, "gradient": zeros_at_first},
    )
