"""FedPer (Arivazhagan et al., 2019, arXiv:1912.00818): every client keeps a head of its own.

All layers below the head are averaged as in FedAvg. The head starts from the server's, which
nobody ever changes, and never leaves the client, so clients may use the same outputs for different
things. A client is measured by the server's layers with its own head.

FedBN (Li et al., ICLR 2021, arXiv:2102.07623): clients keep their own normalisation layers.

The server's copy of them is the clients' mean: it is used to evaluate the server's model, and as
the start of clients never selected before. With no normalisation layers it is FedAvg.

LG-FedAvg (Liang et al., "Think Locally, Act Globally", 2020, arXiv:2001.01523).

Clients keep the lower layers, which represent their own images; the head is averaged as in FedAvg.
It is FedPer upside down. Both parts take every local step together.

FedBABU (Oh et al., ICLR 2022, arXiv:2106.06042): the head is never trained in the rounds.

All clients keep the random head h that the model starts with, and train and send the body alone:
    B_k = B_k - lr grad_B F_k(B_k, h).
At the end of the run each client tunes the whole model, head included, for `tune` passes over its
own examples, and is measured by the result.

FedRep (Collins et al., ICML 2021, arXiv:2102.07078), algorithm 1: first the head, then the body.

A client keeps a head h_k of its own. In a round it first takes steps of the head alone, for
`head_epochs` passes (the paper's tau), then of the body B alone, for `local.epochs` passes:
    h_k = h_k - lr grad_h F_k(B, h_k);    B_k = B_k - lr grad_B F_k(B_k, h_k).
Only the body is sent. FedPer takes steps of both at once.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch

from fedlens.algorithm import Algorithm, at_least, paper
from fedlens.algorithm.pieces import OwnBody, OwnHead, OwnNorms, epochs_of
from fedlens.algorithm.slots import Solve, Wraps
from fedlens.core import Local, Memory, Moved, Tree, per_row, tree_map


@paper
def fedper(base: Algorithm, head: str | None = None) -> Algorithm:
    """Let each client keep a head of its own.

    Args:
        head: the name of the layer that clients keep, with all that is in it; the last linear
            layer, if none is named.
    """
    return replace(base, personal=OwnHead(head))


@paper
def fedbn(base: Algorithm) -> Algorithm:
    """Let each client normalise in its own way."""
    return replace(base, personal=OwnNorms())


@paper
def lg_fedavg(base: Algorithm, head: str | None = None) -> Algorithm:
    """Let each client keep all layers but the head.

    Args:
        head: the name of the layer that is averaged, with all that is in it; the last linear
            layer, if none is named.
    """
    return replace(base, personal=OwnBody(head))


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
