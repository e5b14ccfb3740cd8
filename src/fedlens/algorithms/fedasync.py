"""FedAsync (Xie, Koyejo and Gupta, 2019, arXiv:1903.03934), algorithm 1: one update at a time.

`clients.per_round` clients train at any time. When a client finishes, with a model w_k trained from
the server's model of tau steps ago, the server moves to (1 - alpha_t) w + alpha_t w_k, where
alpha_t = alpha s(tau), and another client starts. s is
  constant    1
  polynomial  (1 + tau)^-a
  hinge       1 if tau <= b, else 1 / (a (tau - b) + 1)
A round is one such step. The paper's local penalty is that of `fedprox`. With one client at a time
and alpha = 1, clients train one model in turn.
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from fedlens.algorithm import Algorithm, at_least, paper, up_to_one
from fedlens.algorithm.pieces import Sgd
from fedlens.algorithm.slots import Pace, Weigh
from fedlens.core import Cohort, Number


@dataclass(frozen=True)
class Mixed(Weigh):
    """alpha s(tau)"""

    alpha: Number
    staleness: Literal["constant", "polynomial", "hinge"]
    a: Number
    b: Number

    def __call__(self, cohort: Cohort) -> Tensor:  # [C] float64
        ones = torch.ones(len(cohort.clients), dtype=torch.float64)
        tau = torch.zeros_like(ones) if cohort.staleness is None else cohort.staleness.double()
        if self.staleness == "polynomial":
            ones = (1 + tau) ** -self.a
        elif self.staleness == "hinge":
            ones = torch.where(tau <= self.b, 1.0, 1 / (self.a * (tau - self.b).clamp(min=0) + 1))
        return self.alpha * ones


@paper
def fedasync(
    base: Algorithm,
    alpha: Number = 0.6,
    staleness: Literal["constant", "polynomial", "hinge"] = "polynomial",
    a: Number = 0.5,
    b: Number = 4.0,
) -> Algorithm:
    """Mix each client's model into the server's as it arrives.

    Args:
        alpha: how much a fresh model counts.
        staleness: how that falls with the model's age.
        a: how fast; with a hinge 10 is customary.
        b: of a hinge, the age at which it begins to.
    """
    up_to_one(alpha, "fedasync: alpha")
    at_least(a, 0, "fedasync: a")
    at_least(b, 0, "fedasync: b")
    if isinstance(base.advance, Sgd) and base.advance.lr != 1.0:
        raise ValueError("fedasync has its own alpha: leave server.lr out")
    return replace(base, weigh=Mixed(alpha, staleness, a, b), pace=Pace(1, since="now"))
