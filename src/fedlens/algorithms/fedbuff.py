"""FedBuff (Nguyen et al., AISTATS 2022, arXiv:2106.06639), algorithm 1: buffered asynchrony.

`clients.per_round` clients train at any time, each from the model that was newest when it started;
when one finishes, another starts. The server collects K updates and then moves by their sum, each
times s(tau) / K, where tau counts the server's steps since the client got its model and s(tau) =
(1 + tau)^-a. A round is one such step. With equally fast clients and K = clients.per_round it is
FedAvg, weighted equally or by the clients' sizes, to the last bit.
"""

from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor

from fedlens.algorithm import Algorithm, at_least, paper
from fedlens.algorithm.pieces import ByExamples, Equally
from fedlens.algorithm.slots import Pace, Weigh
from fedlens.core import Cohort, Number


@dataclass(frozen=True)
class Fading(Weigh):
    """`inner`, times (1 + tau)^-a."""

    inner: ByExamples | Equally
    a: Number

    def __call__(self, cohort: Cohort) -> Tensor:  # [C] float64
        shares = self.inner(cohort)
        if cohort.staleness is None:
            return shares
        return shares * (1 + cohort.staleness.double()) ** -self.a


@paper
def fedbuff(
    base: Algorithm,
    buffer: int = 10,
    a: Number = 0.5,
    weigh: Literal["equally", "examples"] = "equally",
) -> Algorithm:
    """Move as soon as a few updates have arrived, whoever is still training.

    Args:
        buffer: K, the updates that the server collects before it moves.
        a: how fast the weight of an update falls with its age; 0: not at all.
        weigh: `examples` weighs the updates of a buffer by n_k, too.
    """
    at_least(a, 0, "fedbuff: a")
    if buffer < 1:
        raise ValueError(f"fedbuff: buffer is {buffer}: choose 1 or more")
    inner = Equally() if weigh == "equally" else ByExamples()
    return replace(base, weigh=Fading(inner, a), pace=Pace(buffer))
