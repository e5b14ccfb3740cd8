"""FedProx (Li et al., MLSys 2020, arXiv:1812.06127), equation 2.

A client minimises F_k(w) + (mu / 2) ||w - w_server||^2. With mu = 0 it is FedAvg.
"""

from dataclasses import dataclass, replace

from torch import Tensor

from fedlens.algorithm import Algorithm, at_least, paper
from fedlens.core import Local, Number, squared_distance
from fedlens.pieces import Sgd


@dataclass(frozen=True)
class Proximal:
    """(mu / 2) ||w - w_server||^2, over the trainable parameters."""

    mu: Number

    def __call__(self, local: Local) -> Tensor:  # [C]
        return self.mu / 2 * squared_distance(local.params, local.anchor)


@paper
def fedprox(base: Algorithm, mu: Number = 0.01) -> Algorithm:
    """Hold each client near the model it was sent.

    Args:
        mu: how hard it is held.
    """
    at_least(mu, 0, "fedprox: mu")
    _check_stable(base, mu)
    return replace(base, objective=base.objective.plus(Proximal(mu)))


def _check_stable(base: Algorithm, mu: Number) -> None:
    """SGD on the proximal term alone diverges beyond lr * mu = 2 (1 + momentum)."""
    numbers = (mu, *((s.lr, s.momentum) if isinstance(s := base.solve, Sgd) else ()))
    if len(numbers) == 3 and all(isinstance(number, float) for number in numbers):
        _, lr, momentum = numbers
        if lr * mu >= 2 * (1 + momentum):
            most = 2 * (1 + momentum) / lr
            raise ValueError(
                f"fedprox: mu {mu:g} diverges with local.lr {lr:g}: choose mu below {most:g}"
            )
