"""FedRep (Collins et al., ICML 2021, arXiv:2102.07078), algorithm 1: first the head, then the body.

A client keeps a head h_k of its own. In a round it first takes steps of the head alone, for
`head_epochs` passes (the paper's tau), then of the body B alone, for `local.epochs` passes:
    h_k = h_k - lr grad_h F_k(B, h_k);    B_k = B_k - lr grad_B F_k(B_k, h_k).
Only the body is sent. FedPer takes steps of both at once.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch

from fedlens.algorithm import Algorithm, at_least, paper
from fedlens.algorithm.pieces import OwnHead, epochs_of
from fedlens.algorithm.slots import Solve, Wraps
from fedlens.core import Local, Memory, Moved, Tree, per_row, tree_map


@dataclass(frozen=True)
class HeadFirst(Wraps):
    """`inner`, of the client's own tensors in the first of the `epochs`, then of the others."""

    inner: Solve
    head_epochs: int
    epochs: int

    def update(self, grads: Tree, memory: Memory, params: Tree, local: Local) -> Moved:
        assert local.step is not None
        first = local.step < local.steps // self.epochs * self.head_epochs  # [C]

        def held(old: Tree, new: Tree) -> Tree:
            moves: Any = {name: per_row(first == (name in local.own), t) for name, t in old.items()}
            return {name: torch.where(moves[name], new[name], t) for name, t in old.items()}

        before = {name: tree_map(torch.clone, tree) for name, tree in memory.items()}
        old = tree_map(torch.clone, params)
        params, memory = self.inner.update(grads, memory, params, local)
        return held(old, params), {name: held(before[name], memory[name]) for name in before}


@paper
def fedrep(base: Algorithm, head_epochs: int = 10, head: str | None = None) -> Algorithm:
    """Let each client keep a head of its own, and train it before the rest.

    Args:
        head_epochs: passes over its examples that train the head alone (tau), before the
            local.epochs that train the other layers.
        head: the name of the layer that clients keep, with all that is in it; the last linear
            layer, if none is named.
    """
    at_least(head_epochs, 1, "fedrep: head_epochs")
    draw = epochs_of(base.draw, "fedrep")
    epochs = draw.count + head_epochs
    return replace(
        base,
        draw=replace(draw, count=epochs, whole=True),
        solve=HeadFirst(base.solve, head_epochs, epochs),
        personal=OwnHead(head),
    )
