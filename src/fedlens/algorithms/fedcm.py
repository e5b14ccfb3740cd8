"""FedCM (Xu et al., 2021, arXiv:2106.10874), algorithm 1: momentum of all clients in local steps.

A client steps along alpha * g + (1 - alpha) * D, where D is the server's: the mean of what clients
stepped along in the last round, per step, and zero in the first. With K steps of length lr and
x - y the combined difference of a round, D = (x - y) / (K lr). K is the clients' mean, weighted by
their examples, where they take different numbers of steps. With alpha = 1 it is FedAvg.

The paper's server takes x - server_lr * D: `server.lr` here multiplies x - y, which is K lr D.
"""

from dataclasses import dataclass, replace

from torch import Tensor

from fedlens.algorithm import Algorithm, at_least, paper, up_to_one
from fedlens.algorithm.pieces import Corrected, Sgd
from fedlens.algorithm.slots import Tell
from fedlens.core import Gathered, Local, Memory, Number, Tree, per_row, zeros_like
from fedlens.core.federation import Federation


@dataclass(frozen=True)
class Ahead:
    """(1 - alpha) / alpha * D, of a step of alpha * lr"""

    alpha: Number

    def __call__(self, local: Local, name: str) -> Tensor:
        ahead = local.told["momentum"][name].expand_as(local.params[name])
        return per_row((1 - self.alpha) / self.alpha, ahead) * ahead


@dataclass(frozen=True)
class TellMomentum(Tell):
    lr: Number

    def init(self, params: Tree, federation: Federation) -> Memory:
        return {"momentum": zeros_like(params)}

    def update(self, told: Memory, gathered: Gathered) -> Memory:
        cohort = gathered.cohort
        steps = (cohort.steps * cohort.size_shares).sum().clamp(min=1)
        each = -1 / (float(steps) * self.lr)
        return {
            "momentum": {
                name: (gathered.update[name] * each).to(d) for name, d in told["momentum"].items()
            }
        }


@paper
def fedcm(base: Algorithm, alpha: Number = 0.1) -> Algorithm:
    """Mix what all clients stepped along in the last round into every local step.

    Args:
        alpha: the share of a client's own gradient in a step.
    """
    at_least(alpha, 1e-6, "fedcm: alpha")
    up_to_one(alpha, "fedcm: alpha")
    solve = base.solve
    if not isinstance(solve, Sgd) or solve.momentum != 0:
        raise ValueError(
            'fedcm has a momentum of its own: set local.optimizer = "sgd" and local.momentum = 0'
        )
    return replace(
        base,
        solve=Corrected(replace(solve, lr=solve.lr * alpha), Ahead(alpha)),
        tell=(*base.tell, TellMomentum(solve.lr)),
    )
