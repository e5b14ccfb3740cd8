"""Readings of paper 4's LIADMM: when the dual is subtracted, and what is sent and averaged."""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from fedlens.algorithm.pieces.consensus import change, minus
from fedlens.algorithm.slots import Solve, Wraps
from fedlens.core import Local, Memory, Moved, Number, Tree, Upload, keys, per_row, tree_map


@dataclass(frozen=True)
class DualApplied(Wraps):
    """`inner`, with u subtracted from the parameters after every pass, or every step.

    The end of a pass follows from the client's size: it may stop after some of its passes.
    """

    inner: Solve
    batch_size: int | None  # None: every step

    def update(self, grads: Tree, memory: Memory, params: Tree, local: Local) -> Moved:
        params, memory = self.inner.update(grads, memory, params, local)
        for name, v in params.items():
            ends = 1.0 if self.batch_size is None else per_row(self._ends(local).to(v), v)
            v.sub_(local.memory["dual"][name] * ends)
        return params, memory

    def _ends(self, local: Local) -> Tensor:  # [C]
        assert self.batch_size is not None and local.step is not None
        per_pass = (local.facts.size + self.batch_size - 1) // self.batch_size
        return (local.step + 1) % per_pass.clamp(min=1) == 0


@dataclass(frozen=True)
class SendReading:
    """What `liadmm` sends under one of the readings of paper 4."""

    subtract: bool  # whether u is subtracted once, after local training
    average: Literal["all", "sampled"]
    dual_weight: Number
    before: bool = False  # whether what is sent is the state before the local step
    first_dual: float = 0.0

    def __call__(self, local: Local) -> Upload:
        u, z = local.memory["dual"], local.memory["z"]
        if self.first_dual:
            drawn = self._drawn(local)
            u = tree_map(torch.add, u, drawn)
            z = {n: torch.add(t, drawn[n], alpha=float(self.dual_weight)) for n, t in z.items()}
        primal = tree_map(torch.sub, local.params, u) if self.subtract else local.params
        gap = {name: v - local.anchor[name] for name, v in primal.items()}
        dual = {name: d + gap[name] for name, d in u.items()}
        known = local.anchor if self.average == "sampled" else local.memory["z"]
        sent = change(local, primal, gap, dual, known, float(self.dual_weight))
        if self.before:
            old = {name: minus(t, local.anchor[name]) for name, t in z.items()}
            sent = replace(sent, update=sent.update | old, tracks=())
        if self.first_dual:
            begun = tree_map(torch.ones_like, local.memory["begun"])
            sent = replace(sent, keep=sent.keep | {"begun": begun})
        return sent

    def _drawn(self, local: Local) -> Tree:
        """The random u_i of clients in their first round, zeros for the others."""
        is_first = 1 - local.memory["begun"]["begun"]  # [C]
        drawn = {}
        for number, (name, u) in enumerate(local.memory["dual"].items()):
            start = local.told["start"][name].flatten(1)
            size = self.first_dual * start.square().mean(1).sqrt() * is_first
            key = keys.fold(local.key("first dual"), number)[:, None]
            draws = keys.normal(keys.fold(key, torch.arange(u[0].numel(), device=u.device)))
            drawn[name] = (draws * size[:, None]).to(u.dtype).view(u.shape)
        return drawn


def not_begun(params: Tree, told: Memory) -> Tree:
    """The memory of a client that has not taken part."""
    return {"begun": next(iter(params.values())).new_zeros(())}
