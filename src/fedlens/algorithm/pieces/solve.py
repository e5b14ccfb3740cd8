"""solve, advance: how a client, or the server, moves along a gradient."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedlens.algorithm.slots import Drift, LocalStep, Solve, Wraps
from fedlens.config.sections import DecayOn
from fedlens.core import (
    Local,
    Memory,
    Moved,
    Number,
    Tree,
    is_on,
    per_row,
    squared_norm,
    tree_map,
    zeros_like,
)
from fedlens.core.trees import copies
from fedlens.network.ops import sgd_


def decays(on: DecayOn, param: Tensor) -> bool:  # [C, ...]
    return on == "all" or param.ndim > 2


@dataclass(frozen=True)
class Sgd(Solve):
    """Gradient descent with heavy-ball momentum and L2 weight decay, as in torch.optim.SGD.

    d = g + weight_decay * w;  v = momentum * v + d;  w = w - lr * v
    (with `nesterov`, w = w - lr * (d + momentum * v)).
    """

    lr: Number
    momentum: Number = 0.0
    weight_decay: Number = 0.0
    nesterov: bool = False
    weight_decay_on: DecayOn = "all"
    reads_cohort: ClassVar[bool] = False  # at the server

    @property
    def step(self) -> LocalStep | None:
        plain = LocalStep(self.lr, self.momentum, self.weight_decay)
        return None if self.nesterov and is_on(self.momentum) else plain

    @property
    def learning_rate(self) -> Number | None:
        return self.lr

    @property
    def carries(self) -> frozenset[str]:
        return frozenset({"velocity"})

    def init(self, params: Tree) -> Memory:
        return {"velocity": zeros_like(params)} if is_on(self.momentum) else {}

    def update(self, grads: Tree, memory: Memory, params: Tree, context: object = None) -> Moved:
        decays_at_all = is_on(self.weight_decay)
        sgd_(
            list(params.values()),
            [grads[name] for name in params],
            [memory["velocity"][name] for name in params] if memory else [],
            self.lr,
            self.momentum,
            self.weight_decay,
            [decays_at_all and decays(self.weight_decay_on, p) for p in params.values()],
            nesterov=self.nesterov,
        )
        return params, memory


@dataclass(frozen=True)
class ClippedByNorm(Wraps):
    """`inner`, on gradients scaled down to a norm: as torch.nn.utils.clip_grad_norm_ does.

    g = g * min(1, norm / (||g|| + 1e-6)), where ||g|| is over all parameters of a client.
    """

    inner: Solve
    norm: Number

    def update(self, grads: Tree, memory: Memory, params: Tree, local: Local) -> Moved:
        factor = (self.norm / (squared_norm(grads).sqrt() + 1e-6)).clamp(max=1)  # [C]
        for g in grads.values():
            g.mul_(_row(factor, g))
        return self.inner.update(grads, memory, params, local)


@dataclass(frozen=True)
class ClippedByValue(Wraps):
    """`inner`, on gradients whose entries are clamped to +-value, as clip_grad_value_ does."""

    inner: Solve
    value: Number

    def update(self, grads: Tree, memory: Memory, params: Tree, local: Local) -> Moved:
        for g in grads.values():
            most: Any = per_row(self.value, g)
            g.clamp_(-most, most)
        return self.inner.update(grads, memory, params, local)


def is_sgd(solve: Solve) -> bool:
    """Whether steps are those of SGD, on gradients that may be clipped."""
    while isinstance(solve, (ClippedByNorm, ClippedByValue)):
        solve = solve.inner
    return isinstance(solve, Sgd)


@dataclass(frozen=True)
class GradientDescent(Solve):
    """One step along the whole gradient at the end of each pass over a client's examples.

    The gradients of its batches are added up, so a client need not fit into memory at once.
    """

    lr: Number
    passes: int = 1

    @property
    def learning_rate(self) -> Number | None:
        return self.lr

    def init(self, params: Tree) -> Memory:
        return {"gradient": zeros_like(params)}

    def update(self, grads: Tree, memory: Memory, params: Tree, local: Local) -> Moved:
        share, ends = _share(local), local.ends(self.passes)
        for name, p in params.items():
            total = memory["gradient"][name]
            total.addcmul_(grads[name], _row(share, p))
            done = _row(ends, p)
            p.sub_(total * done * per_row(self.lr, p))
            total.mul_(1 - done)
        return params, memory


@dataclass(frozen=True)
class Corrected(Wraps):
    """`inner`, with lr times a correction subtracted after each step, and not part of momentum."""

    inner: Solve
    correction: Drift

    @property
    def drift(self) -> Drift:
        return self._times_lr

    def _times_lr(self, local: Local, name: str) -> Tensor:
        lr = self.learning_rate
        assert lr is not None, "steps of unknown length were refused before"
        extra = self.correction(local, name)
        return extra * per_row(lr, extra)

    def update(self, grads: Tree, memory: Memory, params: Tree, local: Local) -> Moved:
        params, memory = self.inner.update(grads, memory, params, local)
        torch._foreach_sub_([*params.values()], [local.drift[name] for name in params])
        return params, memory


@dataclass(frozen=True)
class Probed(Wraps):
    """`inner`, with passes before and after it in which the model is only measured, not changed.

    Of the `passes` of a client over its examples, `inner` updates the model in all but the first
    (whose full loss and gradient are stored) and, if `after`, the last (whose gradient is stored).
    """

    inner: Solve
    passes: int
    after: bool = False

    def init(self, params: Tree) -> Memory:
        row = next(iter(params.values()))
        memory = {**self.inner.init(params), "before": zeros_like(params)}
        memory["probed"] = {"loss": row.new_zeros(len(row))}
        return memory | ({"after": zeros_like(params)} if self.after else {})

    def update(self, grads: Tree, memory: Memory, params: Tree, local: Local) -> Moved:
        assert local.step is not None and local.loss is not None
        share = _share(local)
        each = (local.steps // self.passes).clamp(min=1)  # [C] steps of a pass
        number = local.step // each  # [C] of the pass
        is_first, is_last = number == 0, number == self.passes - 1
        memory["probed"]["loss"] += local.loss * share * is_first
        for name, g in grads.items():
            memory["before"][name].addcmul_(g, _row(share * is_first, g))
            if self.after:
                memory["after"][name].addcmul_(g, _row(share * is_last, g))
        own = {name: tree for name, tree in memory.items() if name not in OF_PROBES}
        stays = is_first | is_last if self.after else is_first
        old = copies((own, params))
        # `inner` counts only the steps in which it updates the model.
        moving = replace(
            local, step=local.step - each, steps=each * (self.passes - 1 - int(self.after))
        )
        params, own = self.inner.update(grads, own, params, moving)
        held = {name: where_rows(stays, old[0][name], tree) for name, tree in own.items()}
        return where_rows(stays, old[1], params), memory | held


OF_PROBES = {"before", "after", "probed"}


def where_rows(rows: Tensor, one: Tree, other: Tree) -> Tree:
    """`one` for these clients, [C], `other` for the rest."""
    return tree_map(lambda a, b: torch.where(_row(rows, a).bool(), a, b), one, other)


def _share(local: Local) -> Tensor:  # [C] float64
    """The share of a client's examples that is in the batch of this step."""
    assert local.count is not None
    return local.count.double() / local.facts.size.clamp(min=1)


def _row(numbers: Tensor, like: Tensor) -> Tensor:
    """Numbers [C], shaped to multiply `like` [C, ...] row by row."""
    return numbers.to(like.dtype).view(-1, *[1] * (like.ndim - 1))
