"""SCAFFOLD (Karimireddy et al., ICML 2020, arXiv:1910.06378), algorithm 1, option II.

A client steps along g - c_k + c, where c_k is its own control variate and c the server's, all of
them zero at the start. After K steps it sets c_k+ = c_k - c + (x - y) / (K lr), sends y - x and
c_k+ - c_k, and c moves by the sum of the latter over the number of ALL clients. With the controls
held at zero it is FedAvg with equal weights.

The paper and its theory use plain SGD. With local momentum this is what public benchmarks run
(NIID-Bench, Flower): y = y - lr v - lr (c - c_k), where v is the momentum of the gradients alone.
So c_k+ is the mean of v instead of g. If the correction were part of v, c_k - c would be multiplied
by up to 1 - 1 / (1 - momentum) in every round, and diverge from a momentum of 0.5 on.
"""

from dataclasses import dataclass, replace

from torch import Tensor

from fedlens.algorithm import Algorithm, paper
from fedlens.algorithm.pieces import Corrected, Equally, difference, is_sgd
from fedlens.algorithm.slots import Tell
from fedlens.core import Gathered, Local, Memory, Tree, Upload, per_row, zeros_at_first, zeros_like
from fedlens.core.federation import Federation


def correction(local: Local, name: str) -> Tensor:
    """c - c_k"""
    return local.told["control"][name] - local.memory["control"][name]


@dataclass(frozen=True)
class SendControl:
    def __call__(self, local: Local) -> Upload:
        assert local.lr is not None
        change = {}
        for name, y in local.params.items():
            step = per_row(local.steps.clamp(min=1).to(y) * local.lr, y)
            # A client without examples takes no step, and does not change its control.
            stepped = per_row((local.steps > 0).to(y), y)
            change[name] = ((local.anchor[name] - y) / step - local.told["control"][name]) * stepped
        own = {name: local.memory["control"][name] + d for name, d in change.items()}
        return replace(difference(local), keep={"control": own}, extra={"control": change})


@dataclass(frozen=True)
class TellControl(Tell):
    def init(self, params: Tree, federation: Federation) -> Memory:
        return {"control": zeros_like(params)}

    def update(self, told: Memory, gathered: Gathered) -> Memory:
        sums, clients = gathered.extra["control"], gathered.cohort.num_clients
        return {"control": {name: c + sums[name] / clients for name, c in told["control"].items()}}


@paper
def scaffold(base: Algorithm) -> Algorithm:
    """Correct each client's steps for how its gradient differs from everybody's."""
    if not is_sgd(base.solve):
        raise ValueError(
            'scaffold reads gradients off the steps of SGD: set local.optimizer = "sgd", and leave '
            "other local rules out"
        )
    return replace(
        base,
        solve=Corrected(base.solve, correction),
        upload=SendControl(),
        weigh=Equally(),
        tell=(*base.tell, TellControl()),
        memory={**base.memory, "control": zeros_at_first},
    )
