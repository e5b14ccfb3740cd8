"""Ditto (Li et al., ICML 2021, arXiv:2012.04221), algorithm 2: a personal model near the server's.

Beside the model w of FedAvg, which it sends, a client trains a model v_k that it keeps. In each
local step, on the same batch, with w the server's model at the start of the round:
    v_k = v_k - lr (grad F_k(v_k) + lambda (v_k - w)).
With lambda = 0 each client trains alone; with lambda = 1 / lr, v_k is one step from the server's
model; w is FedAvg's whatever lambda is. A client is measured by v_k.
"""

from dataclasses import dataclass, replace

from fedlens.algorithm import Algorithm, at_least, check_pull, paper
from fedlens.algorithm.pieces import SecondModel
from fedlens.algorithm.pieces.personal import TwoModels
from fedlens.algorithm.slots import OWN, Solve
from fedlens.core import Local, Memory, Moved, Number, Tree, per_row


@dataclass(frozen=True)
class PulledSecond(TwoModels):
    """`inner` for both models; the second is pulled towards the server's."""

    inner: Solve
    lambda_: Number

    def update(self, grads: Tree, memory: Memory, params: Tree, local: Local) -> Moved:
        assert local.gradients is not None
        own = memory[OWN]
        pulled = local.gradients(own)
        for name, g in pulled.items():
            pulled[name] = g + per_row(self.lambda_, g) * (own[name] - local.anchor[name])
        return self.step_both(grads, pulled, memory, params, local)


@paper
def ditto(base: Algorithm, lambda_: Number = 0.1) -> Algorithm:
    """Let each client train a second model, held near the server's.

    Args:
        lambda_: how strongly it is held (lambda, called `lambda` in an experiment file); 0 lets
            each client train alone.
    """
    at_least(lambda_, 0, "ditto: lambda")
    check_pull(base, lambda_, "ditto: lambda")
    return replace(base, solve=PulledSecond(base.solve, lambda_), personal=SecondModel())
