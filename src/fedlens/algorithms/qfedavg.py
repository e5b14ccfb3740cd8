"""q-FedAvg (Li et al., ICLR 2020, arXiv:1905.10497), algorithm 2: fair resource allocation.

With F_k the client's loss at the server's model, d_k = (x - w_k) / lr, the server moves by
  - sum_k F_k^q d_k / sum_k h_k,  h_k = q F_k^(q-1) ||d_k||^2 + F_k^q / lr,
so clients with a large loss count more. With q = 0 it is FedAvg with equal weights. F_k is measured
in a separate pass over the client's examples, before the model moves.
"""

from dataclasses import dataclass, replace

import torch

from fedlens.algorithm import Algorithm, at_least, paper
from fedlens.algorithm.pieces import (
    Constant,
    Probed,
    Sgd,
    WeightedSum,
    difference,
    epochs_of,
    is_sgd,
)
from fedlens.algorithm.slots import Advance
from fedlens.core import Gathered, Local, Memory, Moved, Number, Tree, Upload, per_row


@dataclass(frozen=True)
class SendFair:
    """-F_k^q d_k as the update, and h_k."""

    q: Number

    def __call__(self, local: Local) -> Upload:
        assert local.lr is not None
        loss = local.solver["probed"]["loss"].double().clamp(min=1e-10)  # 0 has no negative power
        plain = difference(local)
        weight = loss**self.q
        squares = [plain.update[name].flatten(1).square().sum(1) for name in local.params]
        norm = torch.stack(squares).sum(0) / local.lr**2
        h = self.q * loss ** (self.q - 1) * norm + weight / local.lr
        update = {  # in the precision in which it is sent
            name: (plain.update[name] * per_row(weight / local.lr, plain.update[name]))
            .to(p)
            .double()
            for name, p in local.params.items()
        }
        return replace(plain, update=plain.update | update, extra={"fair": {"h": h}})


@dataclass(frozen=True)
class Fairly(Advance):
    lr: Number

    def init(self, params: Tree) -> Memory:
        return {}

    def update(self, grads: Tree, memory: Memory, params: Tree, gathered: Gathered) -> Moved:
        total = gathered.extra["fair"]["h"]
        return {n: p - per_row(self.lr, p) * grads[n] / total for n, p in params.items()}, memory


@paper
def qfedavg(base: Algorithm, q: Number = 1.0) -> Algorithm:
    """Spread accuracy more evenly over clients.

    Args:
        q: how much a badly served client counts; 0 is FedAvg.
    """
    at_least(q, 0, "qfedavg: q")
    if not is_sgd(base.solve):
        raise ValueError(
            'qfedavg needs SGD: set local.optimizer = "sgd", and leave other local rules out'
        )
    if not isinstance(base.advance, Sgd):
        raise ValueError("qfedavg has its own server step: leave the other server rule out")
    draw = epochs_of(base.draw, "qfedavg", even=False)
    passes = draw.count + 1
    return replace(
        base,
        draw=replace(draw, count=passes),
        solve=Probed(base.solve, passes),
        upload=SendFair(q),
        weigh=Constant(1.0),
        combine=WeightedSum(buffers="examples"),
        advance=Fairly(base.advance.lr),
    )
