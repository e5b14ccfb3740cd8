"""FedNova (Wang et al., NeurIPS 2020, arXiv:2007.07481), equations 8 and 9: normalised steps.

A client that takes more steps moves further, and plain averaging then minimises another objective
than the given one. Each update is divided by |a_k|, how far its steps lead under a constant
gradient, in learning rates; and the mean is scaled back by sum_k p_k |a_k|. For SGD |a_k| is the
number of steps tau, with momentum rho it is (tau - rho (1 - rho^tau) / (1 - rho)) / (1 - rho), and
with FedProx's mu it is (1 - (1 - lr mu)^tau) / (lr mu). With equal steps it is FedAvg.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedlens.algorithm import Algorithm, below_one, paper
from fedlens.algorithm.slots import LocalStep, Weigh
from fedlens.core import Cohort, Number, is_on


@dataclass(frozen=True)
class BySteps(Weigh):
    momentum: Number = 0.0
    pull: Number = 0.0  # lr mu: the share of w - server that a step takes back

    def for_step(self, step: LocalStep | None) -> "BySteps":
        if step is None or step.drift is not None:
            raise ValueError(
                "fednova knows the steps of SGD alone, with heavy-ball momentum: set "
                'local.optimizer = "sgd", and leave local.clip and other local rules out'
            )
        below_one(step.momentum, "fednova: local.momentum")
        pull = step.lr * step.pull
        below_one(pull, "fednova: local.lr times fedprox's mu")
        return BySteps(step.momentum, pull)

    def __call__(self, cohort: Cohort) -> Tensor:  # [C] float64
        weight, share = self.reach(cohort.steps), cohort.size_shares
        moves = torch.where(cohort.steps > 0, weight, 1)  # no 0 / 0 for clients without examples
        return (share * weight).sum() * share / moves

    def reach(self, steps: Tensor) -> Tensor:  # [C] float64
        """|a|: how far steps from zero momentum lead under a gradient of -1, with lr = 1."""
        moved = velocity = torch.zeros(len(steps), dtype=torch.float64)
        for step in range(int(steps.max())):
            velocity = self.momentum * velocity + 1 - self.pull * moved
            moved = torch.where(step < steps, moved + velocity, moved)
        return moved


@paper
def fednova(base: Algorithm) -> Algorithm:
    """Count every client as if all had taken the same steps."""
    step = base.local_step
    if not base.reset and step is not None and is_on(step.momentum):
        raise ValueError(
            "fednova needs momentum that is reset in every round: leave local.reset = false out, "
            "or set local.momentum = 0"
        )
    return replace(base, weigh=BySteps())
