"""SCAFFOLD (Karimireddy et al., ICML 2020, arXiv:1910.06378), algorithm 1, option II.

A client steps along g - c_k + c, where c_k is its own control variate and c the server's, all of
them zero at the start. After K steps it sets c_k+ = c_k - c + (x - y) / (K lr), sends y - x and
c_k+ - c_k, and c moves by the sum of the latter over the number of ALL clients. With the controls
held at zero it is FedAvg with equal weights.

With equal weights clients must take about as many steps. Of very unequal ones the largest takes
many times more steps along c than the others, and c is the mean of gradients most of which come
from a few first steps: on quadratics this diverges, with and without momentum. If everything is
weighed by n_k / n (`weigh`), as in NVFlare, the largest client has as large a part in c.

The paper and its theory use plain SGD. With local momentum this is what public benchmarks run
(NIID-Bench, Flower): y = y - lr v - lr (c - c_k), where v is the momentum of the gradients alone.
So c_k+ is the mean of v instead of g. If the correction were part of v, c_k - c would be multiplied
by up to 1 - 1 / (1 - momentum) in every round, and diverge from a momentum of 0.5 on. If v is kept
from round to round, c_k+ comes to be g / (1 - momentum), and the optimum is reached.
"""

from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor

from fedlens.algorithm import Algorithm, paper
from fedlens.algorithm.pieces import Corrected, Equally, difference, is_sgd
from fedlens.algorithm.slots import Over, Tell, Weigh
from fedlens.core import (
    Cohort,
    Gathered,
    Local,
    Memory,
    Tree,
    Upload,
    per_row,
    zeros_at_first,
    zeros_like,
)
from fedlens.core.federation import Federation


def correction(local: Local, name: str) -> Tensor:
    """c - c_k"""
    return local.told["control"][name] - local.memory["control"][name]


@dataclass(frozen=True)
class SizeShares(Weigh):
    """n_k / n over the cohort. That it counts all clients' examples is for `TellControl`."""

    over: Over = "population"

    def __call__(self, cohort: Cohort) -> Tensor:  # [C] float64
        return cohort.size_shares


@dataclass(frozen=True)
class SendControl:
    by_size: bool = False

    def __call__(self, local: Local) -> Upload:
        assert local.lr is not None
        change = {}
        for name, y in local.params.items():
            step = per_row(local.steps.clamp(min=1).to(y) * local.lr, y)
            # A client without examples takes no step, and does not change its control.
            stepped = per_row((local.steps > 0).to(y), y)
            change[name] = ((local.anchor[name] - y) / step - local.told["control"][name]) * stepped
        own = {name: local.memory["control"][name] + d for name, d in change.items()}
        if self.by_size:
            change = {name: per_row(local.facts.size.to(d), d) * d for name, d in change.items()}
        return replace(difference(local), keep={"control": own}, extra={"control": change})


@dataclass(frozen=True)
class TellControl(Tell):
    by_size: bool = False

    def init(self, params: Tree, federation: Federation) -> Memory:
        return {"control": zeros_like(params)}

    def update(self, told: Memory, gathered: Gathered) -> Memory:
        sums, cohort = gathered.extra["control"], gathered.cohort
        total = max(cohort.num_examples, 1) if self.by_size else cohort.num_clients
        return {"control": {name: c + sums[name] / total for name, c in told["control"].items()}}


@paper
def scaffold(base: Algorithm, weigh: Literal["equally", "examples"] = "equally") -> Algorithm:
    """Correct each client's steps for how its gradient differs from everybody's.

    Args:
        weigh: `examples` weighs updates and controls by n_k, for clients of very unequal sizes.
    """
    if not is_sgd(base.solve):
        raise ValueError(
            'scaffold reads gradients off the steps of SGD: set local.optimizer = "sgd", and leave '
            "other local rules out"
        )
    by_size = weigh == "examples"
    return replace(
        base,
        solve=Corrected(base.solve, correction),
        upload=SendControl(by_size),
        weigh=SizeShares() if by_size else Equally(),
        tell=(*base.tell, TellControl(by_size)),
        memory={**base.memory, "control": zeros_at_first},
    )
