"""FedProx (Li et al., MLSys 2020, arXiv:1812.06127), equation 2 and algorithm 2.

A client minimises h_k(w) = F_k(w) + (mu / 2) ||w - w_server||^2. With mu = 0 it is FedAvg. The
original draws clients with probability n_k / n and takes their plain mean; drawing uniformly and
weighting by n_k / n is the default here, as in FedAvg. For equal sizes both are the same.
"""

from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor

from fedlens.algorithm import Algorithm, at_least, check_pull, paper
from fedlens.algorithm.pieces import BySize, Equally, Probed, difference, epochs_of
from fedlens.algorithm.slots import Penalty
from fedlens.core import Local, Number, Upload, squared_distance, squared_norm


@dataclass(frozen=True)
class Proximal(Penalty):
    """(mu / 2) ||w - w_server||^2, over the trainable parameters."""

    mu: Number

    def __call__(self, local: Local) -> Tensor:  # [C]
        return self.mu / 2 * squared_distance(local.params, local.anchor)

    @property
    def pull(self) -> Number | None:
        return self.mu


@dataclass(frozen=True)
class SendInexactness:
    """The update and, for the record, gamma = ||grad h(w+)|| / ||grad h(w_server)||."""

    def __call__(self, local: Local) -> Upload:
        before, after = (squared_norm(local.solver[name]).sqrt() for name in ("before", "after"))
        return replace(difference(local), scalars={"inexactness": after / before.clamp(min=1e-30)})


@paper
def fedprox(
    base: Algorithm,
    mu: Number = 0.01,
    sampling: Literal["uniform", "by-size"] = "uniform",
    uneven: float = 0.0,
    inexactness: bool = False,
) -> Algorithm:
    """Hold each client near the model it was sent.

    Args:
        mu: how hard it is held.
        sampling: `by-size` draws clients by n_k / n, with replacement, and takes the plain mean.
        uneven: the share of clients that have time for only some of their epochs.
        inexactness: record how far clients came, which costs two more passes over their examples.
    """
    at_least(mu, 0, "fedprox: mu")
    check_pull(base, mu, "fedprox: mu")
    amended = replace(base, objective=base.objective.plus(Proximal(mu)))
    if sampling == "by-size":
        amended = replace(amended, select=BySize(base.select.cohort_size), weigh=Equally())
    if not (uneven or inexactness):
        return amended
    draw = epochs_of(base.draw, "fedprox with uneven work or inexactness", even=False)
    if not 0 <= uneven <= 1 or (uneven and inexactness):
        raise ValueError(f"fedprox: uneven is {uneven}: choose 0 to 1, and no inexactness with it")
    if uneven:
        return replace(amended, draw=replace(draw, uneven=uneven))
    passes = draw.count + 2
    return replace(
        amended,
        draw=replace(draw, count=passes),
        solve=Probed(base.solve, passes, after=True),
        upload=SendInexactness(),
    )
