"""solve, advance: how a client, or the server, moves along a gradient."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedlens.core import Memory, Number, Tree, per_row, tree_map


@dataclass(frozen=True)
class Sgd:
    """Gradient descent with heavy-ball momentum and L2 weight decay, as torch.optim.SGD's.

    d = g + weight_decay * w;  v = momentum * v + d;  w = w - lr * v
    (with `nesterov`, w = w - lr * (d + momentum * v)).
    """

    lr: Number
    momentum: Number = 0.0
    weight_decay: Number = 0.0
    nesterov: bool = False

    def init(self, params: Tree) -> Memory:
        return {"velocity": tree_map(torch.zeros_like, params)} if _is_on(self.momentum) else {}

    def update(self, grads: Tree, memory: Memory, params: Tree) -> tuple[Tree, Memory]:
        w, d = list(params.values()), [grads[name] for name in params]
        if _is_on(self.weight_decay):
            _add(d, w, self.weight_decay)
        if memory:
            v = [memory["velocity"][name] for name in params]
            _scale(v, self.momentum)
            _add(v, d, 1.0)
            if self.nesterov:
                _add(d, v, self.momentum)
            else:
                d = v
        _add(w, d, -self.lr)
        return params, memory


def _is_on(number: Number) -> bool:
    return isinstance(number, Tensor) or number != 0


def _add(to: list[Tensor], what: list[Tensor], times: Number) -> None:
    """to += times * what, in place."""
    if isinstance(times, Tensor):
        for a, b in zip(to, what, strict=True):
            a.addcmul_(b, torch.as_tensor(per_row(times, b)))
    else:
        torch._foreach_add_(to, what, alpha=times)


def _scale(what: list[Tensor], times: Number) -> None:
    if isinstance(times, Tensor):
        for a in what:
            a.mul_(torch.as_tensor(per_row(times, a)))
    else:
        torch._foreach_mul_(what, times)
