"""APFL (Deng et al., 2020, arXiv:2003.13461), algorithm 1: a mixture of the client's and ours.

Beside the model w of FedAvg, which it sends, a client trains a model v_k that it keeps, as part of
a mixture u_k = alpha_k v_k + (1 - alpha_k) w_k. In each local step, on the same batch:
    v_k = v_k - lr alpha_k grad F_k(u_k).
If `adaptive`, the first step of a round moves the client's own alpha_k, kept within 0 and 1:
    alpha_k = alpha_k - lr <v_k - w_k, grad F_k(u_k)>,
where the rate is local.lr. A client is measured by u_k with the server's w. With alpha = 1, not
adaptive, each client trains alone; with alpha = 0 it is FedAvg.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedlens.algorithm import Algorithm, paper, up_to_one
from fedlens.algorithm.pieces import Keeping
from fedlens.algorithm.pieces.personal import TwoModels
from fedlens.algorithm.slots import OWN, Personal, Solve
from fedlens.core import Local, Memory, Moved, Tree, per_row
from fedlens.network.layout import Layout

ALPHA = "alpha"


@dataclass(frozen=True)
class MixedSecond(TwoModels):
    """`inner` for both models; the second follows the gradient of the mixture."""

    inner: Solve
    adaptive: bool

    def init(self, params: Tree) -> Memory:
        row = next(iter(params.values()))
        return {**super().init(params), ALPHA: {ALPHA: row.new_zeros(len(row))}}

    def update(self, grads: Tree, memory: Memory, params: Tree, local: Local) -> Moved:
        assert local.gradients is not None and local.step is not None
        own, first = memory[OWN], local.step == 0
        alpha = torch.where(first, local.memory[ALPHA][ALPHA], memory[ALPHA][ALPHA])  # [C]
        found = local.gradients(own | mixed(own, params, alpha))
        if self.adaptive:
            lr = self.learning_rate
            assert lr is not None, "steps of unknown length were refused before"
            slopes = [((own[n] - params[n]) * g).flatten(1).sum(1) for n, g in found.items()]
            moved = (alpha - lr * torch.stack(slopes).sum(0)).clamp(0, 1)
            alpha = torch.where(first, moved, alpha)
        memory = memory | {ALPHA: {ALPHA: alpha}}
        found = {name: per_row(alpha, g) * g for name, g in found.items()}
        return self.step_both(grads, found, memory, params, local)


def mixed(own: Tree, params: Tree, alpha: Tensor) -> Tree:
    """The mixture of two models, [C, ...] with alpha [C]."""
    weight: Any = {name: per_row(alpha, p) for name, p in params.items()}
    return {name: torch.lerp(p, own[name], weight[name]) for name, p in params.items()}


@dataclass(frozen=True)
class FirstAlpha:
    alpha: float

    def __call__(self, params: Tree, told: Memory) -> Tree:
        return {ALPHA: next(iter(params.values())).new_tensor(self.alpha)}


@dataclass(frozen=True)
class Mixture(Personal):
    """The mixture of a second model and the server's, running statistics included."""

    beside: ClassVar[bool] = True

    def names(self, layout: Layout) -> Collection[str]:
        return [*layout.entries]

    def model(self, model: Tree, memory: Memory) -> Tree:
        if not memory:
            return model
        alpha = memory[ALPHA][ALPHA]
        return model | {
            name: torch.lerp(model[name], t, alpha.to(t)) if t.is_floating_point() else t
            for name, t in memory[OWN].items()
        }


@paper
def apfl(base: Algorithm, alpha: float = 0.5, adaptive: bool = True) -> Algorithm:
    """Let each client mix a second model of its own into the server's.

    Args:
        alpha: the share of the client's own model, at first.
        adaptive: whether each client learns its share.
    """
    up_to_one(alpha, "apfl: alpha")
    if adaptive and base.solve.learning_rate is None:
        raise ValueError(
            "apfl learns alpha with local.lr, and here steps have none: set adaptive = false, or "
            "leave local.anneal out"
        )
    return replace(
        base,
        solve=MixedSecond(base.solve, adaptive),
        upload=Keeping(base.upload, ALPHA),
        personal=Mixture(),
        memory={**base.memory, ALPHA: FirstAlpha(alpha)},
    )
