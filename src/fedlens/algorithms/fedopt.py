"""FedAdam, FedYogi and FedAdagrad (Reddi et al., ICLR 2021, arXiv:2003.00295), algorithm 2.

With d the clients' mean update: m = beta1 m + (1 - beta1) d, and w = w + lr m / (sqrt(v) + tau),
where v starts at tau^2 and moves by
  FedAdagrad  v = beta2 v + d^2, where Adagrad's own sum has beta2 = 1
  FedYogi     v = v - (1 - beta2) d^2 sign(v - d^2)
  FedAdam     v = beta2 v + (1 - beta2) d^2
There is no bias correction. As tau grows, the first two with beta1 = 0 and lr = 2 tau become FedAvg
(the first with beta2 = 1); FedAdam forgets where v started, and its steps grow from lr / (2 tau) to
lr / tau.
"""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedlens.algorithm import Algorithm, at_least, below_one, paper, up_to_one
from fedlens.algorithm.pieces import Sgd
from fedlens.algorithm.slots import Advance
from fedlens.core import Gathered, Memory, Moved, Number, Tree, per_row, zeros_like


@dataclass(frozen=True)
class Adaptive(Advance):
    kind: Literal["adagrad", "yogi", "adam"]
    lr: Number
    beta1: Number
    beta2: Number
    tau: Number
    reads_cohort: ClassVar[bool] = False

    def init(self, params: Tree) -> Memory:
        start = {n: torch.zeros_like(p) + per_row(self.tau, p) ** 2 for n, p in params.items()}
        return {"m": zeros_like(params), "v": start}

    def update(self, grads: Tree, memory: Memory, params: Tree, gathered: Gathered) -> Moved:
        m, v, moved = memory["m"], memory["v"], {}
        for name, p in params.items():
            d = -grads[name]
            lr, beta1, tau = (per_row(number, p) for number in (self.lr, self.beta1, self.tau))
            m[name] = beta1 * m[name] + (1 - beta1) * d
            v[name] = self._second(v[name], d.square(), per_row(self.beta2, p))
            moved[name] = p + lr * m[name] / (v[name].sqrt() + tau)
        return moved, {"m": m, "v": v}

    def _second(self, v: Tensor, square: Tensor, beta2: Number) -> Tensor:
        if self.kind == "adagrad":
            return beta2 * v + square
        if self.kind == "yogi":
            return v - (1 - beta2) * square * (v - square).sign()
        return beta2 * v + (1 - beta2) * square


def _adaptive(base: Algorithm, name: str, rule: Adaptive) -> Algorithm:
    if isinstance(base.advance, Sgd) and base.advance.lr != 1.0:
        raise ValueError(f"{name} has its own lr: leave server.lr out, and set it there")
    at_least(rule.lr, 0, f"{name}: lr")
    below_one(rule.beta1, f"{name}: beta1")
    if rule.kind == "adagrad":
        up_to_one(rule.beta2, f"{name}: beta2")
    else:
        below_one(rule.beta2, f"{name}: beta2")
    at_least(rule.tau, 1e-12, f"{name}: tau")
    return replace(base, advance=rule)


@paper
def fedadam(
    base: Algorithm,
    lr: Number = 0.01,
    beta1: Number = 0.9,
    beta2: Number = 0.99,
    tau: Number = 1e-3,
) -> Algorithm:
    """Let the server move by Adam.

    Args:
        lr: eta, the server's.
        beta1: how long the mean of updates remembers.
        beta2: how long the mean of their squares remembers.
        tau: how far it adapts: the smaller, the more.
    """
    return _adaptive(base, "fedadam", Adaptive("adam", lr, beta1, beta2, tau))


@paper
def fedyogi(
    base: Algorithm,
    lr: Number = 0.01,
    beta1: Number = 0.9,
    beta2: Number = 0.99,
    tau: Number = 1e-3,
) -> Algorithm:
    """Let the server move by Yogi, whose steps change more slowly than Adam's.

    Args:
        lr: eta, the server's.
        beta1: how long the mean of updates remembers.
        beta2: how long the mean of their squares remembers.
        tau: how far it adapts: the smaller, the more.
    """
    return _adaptive(base, "fedyogi", Adaptive("yogi", lr, beta1, beta2, tau))


@paper
def fedadagrad(
    base: Algorithm,
    lr: Number = 0.01,
    beta1: Number = 0.0,
    beta2: Number = 1.0,
    tau: Number = 1e-3,
) -> Algorithm:
    """Let the server move by Adagrad, whose steps only shrink.

    Args:
        lr: eta, the server's.
        beta1: how long the mean of updates remembers.
        beta2: what is kept of the sum of squares each round; below 1, steps may grow again.
        tau: how far it adapts: the smaller, the more.
    """
    return _adaptive(base, "fedadagrad", Adaptive("adagrad", lr, beta1, beta2, tau))
