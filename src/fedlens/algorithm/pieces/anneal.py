"""solve: a learning rate that falls in the course of a client's round, from step to step."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Any, Protocol

import torch
from torch import Tensor

from fedlens.algorithm.slots import Solve, Wraps
from fedlens.config.options import Bounds
from fedlens.core import Local, Memory, Moved, Number, Tree

Share = Callable[[Tensor], Tensor]
"""The factor of the learning rate [C] as a function of the share of steps taken, 0 to 1 [C]."""


class Stepping(Solve, Protocol):
    """A solver whose learning rate is a field."""

    lr: Number


@dataclass(frozen=True)
class Annealed(Wraps):
    """`inner`, whose lr is multiplied by `share` in every step."""

    inner: Stepping
    share: Share

    @property
    def learning_rate(self) -> Number | None:
        return None  # it changes in every step

    def update(self, grads: Tree, memory: Memory, params: Tree, local: Local) -> Moved:
        assert local.step is not None
        over = local.step / local.steps.clamp(min=1)  # [C]
        share = self.share(over.to(next(iter(params.values()))))
        now: Any = replace(self.inner, lr=self.inner.lr * share)  # type: ignore[type-var]
        params, memory = now.update(grads, memory, params, local)
        return params, memory


@dataclass(frozen=True)
class AlongCosine:
    end: Number

    def __call__(self, over: Tensor) -> Tensor:  # [C]
        return self.end + (1 - self.end) * (1 + torch.cos(torch.pi * over)) / 2


@dataclass(frozen=True)
class AlongLine:
    end: Number

    def __call__(self, over: Tensor) -> Tensor:  # [C]
        return self.end + (1 - self.end) * (1 - over)


def cosine(*, end: Annotated[Number, Bounds(least=0)] = 0.0) -> AlongCosine:
    """Half a cosine, down to this share of the learning rate."""
    return AlongCosine(end)


def linear(*, end: Annotated[Number, Bounds(least=0)] = 0.0) -> AlongLine:
    """A line, down to this share of the learning rate."""
    return AlongLine(end)


def annealed(solve: Solve, share: Share) -> Annealed:
    """`solve` with its learning rate annealed; it must have a field `lr`."""
    if not hasattr(solve, "lr"):
        raise ValueError(
            f"local.anneal: {type(solve).__name__} has no field `lr`: choose sgd, adam or adamw"
        )
    return Annealed(solve, share)  # type: ignore[arg-type]
