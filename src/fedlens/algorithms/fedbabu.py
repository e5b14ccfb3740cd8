"""FedBABU (Oh et al., ICLR 2022, arXiv:2106.06042): the head is never trained in the rounds.

All clients keep the random head h that the model starts with, and train and send the body alone:
    B_k = B_k - lr grad_B F_k(B_k, h).
At the end of the run each client tunes the whole model, head included, for `tune` passes over its
own examples, and is measured by the result.
"""

from dataclasses import dataclass, replace

from fedlens.algorithm import Algorithm, at_least, paper
from fedlens.algorithm.pieces import OwnHead
from fedlens.algorithm.slots import Solve, Wraps
from fedlens.core import Local, Memory, Moved, Tree


@dataclass(frozen=True)
class BodyAlone(Wraps):
    """`inner`, of all tensors but the client's own."""

    inner: Solve

    def update(self, grads: Tree, memory: Memory, params: Tree, local: Local) -> Moved:
        body = {name: p for name, p in params.items() if name not in local.own}
        return self.inner.update({name: grads[name] for name in body}, memory, body, local)


@paper
def fedbabu(base: Algorithm, tune: int = 5, head: str | None = None) -> Algorithm:
    """Train all layers but the head, which each client tunes at the end.

    Args:
        tune: passes over its own examples in which a client tunes the final model.
        head: the name of the layer that stays as it is, with all that is in it; the last linear
            layer, if none is named.
    """
    at_least(tune, 0, "fedbabu: tune")
    return replace(base, solve=BodyAlone(base.solve), personal=OwnHead(head, tune))
