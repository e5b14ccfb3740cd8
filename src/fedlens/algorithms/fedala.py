"""FedALA (Zhang et al., AAAI 2023, arXiv:2212.01197): each client mixes the server's head into its.

A client starts a round with the server's layers and, in place of the server's head, with
    theta = theta_k + (theta_server - theta_k) * W,    elementwise, 0 <= W <= 1,
where theta_k is the head of its own model after its last round. Before it trains, it learns W,
which is 1 at first and stays with it, for `epochs` passes, by steps of length `eta` on its loss:
    W = clip(W - eta grad_theta F_k * (theta_server - theta_k), 0, 1).
Then it trains and sends the whole model as in FedAvg. It is measured by its own whole model. In the
paper the first W is learned until it settles, and from a part of the examples; here every one from
all of them. In a client's first round there is nothing to mix, and these passes change nothing.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from fedlens.algorithm import Algorithm, at_least, paper
from fedlens.algorithm.pieces import Keeping, OwnHead, epochs_of
from fedlens.algorithm.pieces.personal import head_of
from fedlens.algorithm.pieces.solve import where_rows
from fedlens.algorithm.slots import OWN, Personal, Solve, Wraps
from fedlens.core import Local, Memory, Moved, Number, Tree, per_row
from fedlens.core.trees import copies
from fedlens.network.layout import Layout

WEIGHTS = "weights"


@dataclass(frozen=True)
class MixFirst(Wraps):
    """Learns W in the first of the `epochs`, and takes steps of `inner` in the others."""

    inner: Solve
    eta: Number
    mixing: int
    epochs: int
    head: str | None

    def init(self, params: Tree) -> Memory:
        head = head_of(params, self.head, axes=1)
        ones = {name: torch.ones_like(params[name]) for name in head}
        return {**self.inner.init(params), WEIGHTS: ones}

    def update(self, grads: Tree, memory: Memory, params: Tree, local: Local) -> Moved:
        assert local.step is not None
        first = local.step < local.steps // self.epochs * self.mixing  # [C]
        weights = where_rows(local.step > 0, memory[WEIGHTS], local.memory[WEIGHTS])
        own = local.memory[OWN]
        learned, mixed = dict(weights), dict(params)
        for name, w in weights.items():
            away = local.anchor[name] - own[name]
            learned[name] = (w - per_row(self.eta, w) * grads[name] * away).clamp(0, 1)
            mixed[name] = torch.lerp(own[name], local.anchor[name], learned[name])
        solver = {name: tree for name, tree in memory.items() if name != WEIGHTS}
        before, stays = copies(solver), copies(mixed)
        moved, solver = self.inner.update(grads, solver, params, local)
        solver = {name: where_rows(first, before[name], tree) for name, tree in solver.items()}
        weights = where_rows(first, learned, weights)
        return where_rows(first, stays, moved), {**solver, WEIGHTS: weights}


@dataclass(frozen=True)
class MixedHead(Personal):
    """The client's own model; the head that it starts from is mixed with the server's."""

    head: str | None
    averaged: ClassVar[bool] = True

    def names(self, layout: Layout) -> Collection[str]:
        if self.head is not None or layout.last is None:
            OwnHead(self.head).names(layout)  # which refuses one that is not there
        return [*layout.entries]

    def start(self, model: Tree, memory: Memory) -> Tree:
        own = memory[OWN]
        return {n: torch.lerp(own[n], model[n], w) for n, w in memory[WEIGHTS].items()}


@dataclass(frozen=True)
class AllOfTheServers:
    """The first W."""

    head: str | None

    def __call__(self, params: Tree, told: Memory) -> Tree:
        return {name: torch.ones_like(params[name]) for name in head_of(params, self.head)}


@paper
def fedala(
    base: Algorithm, epochs: int = 1, eta: Number = 1.0, head: str | None = None
) -> Algorithm:
    """Let each client mix the server's head into its own.

    Args:
        epochs: passes over its examples that learn the mixture, before the local.epochs.
        eta: the length of their steps.
        head: the name of the layer that is mixed, with all that is in it; the last linear layer,
            if none is named.
    """
    at_least(epochs, 1, "fedala: epochs")
    at_least(eta, 0, "fedala: eta")
    draw = epochs_of(base.draw, "fedala")
    total = draw.count + epochs
    return replace(
        base,
        draw=replace(draw, count=total, whole=True),
        solve=MixFirst(base.solve, eta, epochs, total, head),
        upload=Keeping(base.upload, WEIGHTS),
        personal=MixedHead(head),
        memory={**base.memory, WEIGHTS: AllOfTheServers(head)},
    )
