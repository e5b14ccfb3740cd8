"""The local optimisers that `local.optimizer` may name, each a function of the local settings.

A step is that of the optimiser of the same name in `torch.optim`, for many clients at once.
"""

from dataclasses import dataclass
from typing import Annotated, Protocol

import torch

from fedlens.algorithm.pieces.solve import Sgd, decays
from fedlens.algorithm.slots import Solve
from fedlens.config.options import Bounds
from fedlens.config.sections import DecayOn
from fedlens.core import Memory, Moved, Number, Tree, is_on, per_row, zeros_like

Beta = Annotated[float, Bounds(least=0, below=1)]
Above0 = Annotated[float, Bounds(above=0)]


class LocalSettings(Protocol):
    """What an optimiser is called with: the settings of `local` in an experiment."""

    @property
    def lr(self) -> float: ...
    @property
    def momentum(self) -> float: ...
    @property
    def weight_decay(self) -> float: ...
    @property
    def weight_decay_on(self) -> DecayOn: ...


@dataclass(frozen=True)
class Adam(Solve):
    """Adam (Kingma and Ba, ICLR 2015, arXiv:1412.6980), algorithm 1; t counts a client's steps.

    m = beta1 m + (1 - beta1) g;  v = beta2 v + (1 - beta2) g^2
    w = w - lr (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)

    Weight decay is added to g or, if `decoupled`, taken off w first: w = w - lr weight_decay w. The
    latter is AdamW (Loshchilov and Hutter, ICLR 2019, arXiv:1711.05101).
    """

    lr: Number
    beta1: Number = 0.9
    beta2: Number = 0.999
    eps: Number = 1e-8
    weight_decay: Number = 0.0
    decoupled: bool = False
    weight_decay_on: DecayOn = "all"

    @property
    def learning_rate(self) -> Number | None:
        return self.lr

    @property
    def carries(self) -> frozenset[str]:
        return frozenset({"first", "second", "taken"})

    def init(self, params: Tree) -> Memory:
        row = next(iter(params.values()))
        taken = {"steps": row.new_zeros(len(row), dtype=torch.float64)}  # [C]
        return {"first": zeros_like(params), "second": zeros_like(params), "taken": taken}

    def update(self, grads: Tree, memory: Memory, params: Tree, local: object = None) -> Moved:
        steps = memory["taken"]["steps"].add_(1)
        # In float64: 1 - beta2^t is a difference of nearly equal numbers.
        rate = self.lr / (1 - self.beta1**steps)  # [C]
        spread = (1 - self.beta2**steps).sqrt()  # [C]
        for name, w in params.items():
            g, m, v = grads[name], memory["first"][name], memory["second"][name]
            beta1, beta2 = (per_row(number, w) for number in (self.beta1, self.beta2))
            if is_on(self.weight_decay) and decays(self.weight_decay_on, w):
                decay = per_row(self.weight_decay, w)
                if self.decoupled:
                    w.mul_(1 - per_row(self.lr, w) * decay)
                else:
                    g.add_(w * decay)
            m.lerp_(g, 1 - beta1)
            v.mul_(beta2).addcmul_(g, g * (1 - beta2))
            size = v.sqrt().div_(per_row(spread.to(w), w)).add_(per_row(self.eps, w))
            w.addcdiv_(m, size.div_(per_row(-rate.to(w), w)))
        return params, memory


def sgd(local: LocalSettings, *, nesterov: bool = False) -> Sgd:
    """Gradient descent with `local.momentum`.

    Args:
        nesterov: look ahead along the momentum.
    """
    if nesterov and not local.momentum:
        raise ValueError("sgd: nesterov needs momentum: set local.momentum, or leave nesterov out")
    return Sgd(local.lr, local.momentum, local.weight_decay, nesterov, local.weight_decay_on)


def adam(
    local: LocalSettings, *, beta1: Beta = 0.9, beta2: Beta = 0.999, eps: Above0 = 1e-8
) -> Adam:
    """Adam, with weight decay in the gradient.

    Args:
        beta1: how long the mean of gradients remembers.
        beta2: how long the mean of their squares remembers.
        eps: what is added to the root of that mean.
    """
    return _adam("adam", local, beta1, beta2, eps)


def adamw(
    local: LocalSettings, *, beta1: Beta = 0.9, beta2: Beta = 0.999, eps: Above0 = 1e-8
) -> Adam:
    """Adam, with weight decay apart from the gradient.

    Args:
        beta1: how long the mean of gradients remembers.
        beta2: how long the mean of their squares remembers.
        eps: what is added to the root of that mean.
    """
    return _adam("adamw", local, beta1, beta2, eps)


def _adam(name: str, local: LocalSettings, beta1: float, beta2: float, eps: float) -> Adam:
    if local.momentum:
        raise ValueError(f"{name} has beta1 for momentum: leave local.momentum out")
    decay, decoupled = local.weight_decay, name == "adamw"
    return Adam(local.lr, beta1, beta2, eps, decay, decoupled, local.weight_decay_on)
