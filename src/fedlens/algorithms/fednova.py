"""FedNova (Wang et al., NeurIPS 2020, arXiv:2007.07481), equations 8 and 9: normalised steps.

A client that takes more steps moves further, and plain averaging then minimises another objective
than was asked for. Each update is divided by |a_k|, the weight of its steps, and the mean scaled
back by sum_k p_k |a_k|. For SGD |a_k| is the number of steps; with momentum rho it is
(tau - rho (1 - rho^tau) / (1 - rho)) / (1 - rho). With equal steps it is FedAvg.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedlens.algorithm import Algorithm, paper
from fedlens.core import Cohort, Number
from fedlens.pieces import Sgd


@dataclass(frozen=True)
class BySteps:
    momentum: Number = 0.0

    def __call__(self, cohort: Cohort) -> Tensor:  # [C] float64
        steps = cohort.steps.double()
        rho = torch.as_tensor(self.momentum, dtype=torch.float64)
        weight = (steps - rho * (1 - rho**steps) / (1 - rho)) / (1 - rho)
        share = cohort.size_shares
        return (share * weight).sum() * share / weight.clamp(min=1)


@paper
def fednova(base: Algorithm) -> Algorithm:
    """Count every client as if all had taken the same steps."""
    if not isinstance(base.solve, Sgd):
        raise ValueError("fednova knows the steps of SGD alone: leave the other local rule out")
    if isinstance(base.solve.momentum, float) and base.solve.momentum >= 1:
        raise ValueError(f"fednova: local.momentum is {base.solve.momentum}: choose below 1")
    return replace(base, weigh=BySteps(base.solve.momentum))
