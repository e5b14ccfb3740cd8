"""Consensus ADMM in scaled form: what `admm`, `liadmm` and their variants share.

Client i has a dual u_i = pi_i / (w_i rho). It minimises f_i(v) + (rho / 2) ||v - x + u_i||^2 from
v = x, then u_i = u_i + v - x and z_i = v + u_i. The server's x is the mean of the z_i of ALL
clients: those that take part send the change of theirs.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from fedlens.algorithm.pieces.upload import difference
from fedlens.algorithm.slots import Advance, LocalStep, Solve, Tell, Wraps
from fedlens.core import (
    Gathered,
    Local,
    Memory,
    Moved,
    Number,
    Tree,
    Upload,
    per_row,
    zeros_at_first,
    zeros_like,
)
from fedlens.core.federation import Federation


@dataclass(frozen=True)
class Consensus(Wraps):
    """`inner`, on f(v) + (rho / 2) ||v - x + u||^2.

    u moves by v - x k0 times in a round, each time after the same number of steps.
    """

    inner: Solve
    rho: Number
    k0: int = 1

    @property
    def step(self) -> LocalStep | None:
        inner = self.inner.step
        if inner is None or self.k0 > 1:
            return None
        return replace(inner, pull=inner.pull + self.rho, drift=TimesDual(self.rho))

    def init(self, params: Tree) -> Memory:
        memory = self.inner.init(params)
        return {**memory, "moved": zeros_like(params)} if self.k0 > 1 else memory

    def update(self, grads: Tree, memory: Memory, params: Tree, local: Local) -> Moved:
        moved, dual = memory.get("moved"), local.memory["dual"]
        for name, v in params.items():
            pull = v - local.anchor[name] + dual[name]
            if moved is not None:
                pull += moved[name]
            grads[name].add_(pull * per_row(self.rho, v))
        own = {name: tree for name, tree in memory.items() if name != "moved"}
        params, own = self.inner.update(grads, own, params, local)
        if moved is None:  # k0 = 1: `send_change` moves the dual, after all steps
            return params, own
        ends = local.ends(self.k0)
        for name, v in params.items():
            moved[name].add_((v - local.anchor[name]) * per_row(ends.to(v), v))
        return params, {**own, "moved": moved}


@dataclass(frozen=True)
class TimesDual:
    """rho u: what the dual adds to every gradient."""

    rho: Number

    def __call__(self, local: Local, name: str) -> Tensor:
        dual = local.memory["dual"][name]
        return per_row(self.rho, dual) * dual


def send_change(local: Local) -> Upload:
    """z_new - z_old, with the dual moved by v - x, unless `Consensus` has moved it already."""
    gap = {name: v - local.anchor[name] for name, v in local.params.items()}
    moved = local.solver.get("moved", gap)
    dual = {name: u + moved[name] for name, u in local.memory["dual"].items()}
    return change(local, local.params, gap, dual, local.memory["z"])


def change(
    local: Local, primal: Tree, gap: Tree, dual: Tree, z_old: Tree, dual_weight: float = 1.0
) -> Upload:
    """z_new - z_old and, for the record, ||v - x||^2, whose weighted mean is the primal residual.

    `gap` is v - x.
    """
    z = {name: torch.add(v, dual[name], alpha=dual_weight) for name, v in primal.items()}
    of_buffers = {name: t for name, t in local.exact.items() if name not in primal}
    plain = difference(replace(local, exact=of_buffers))
    norms = [torch.linalg.vector_norm(t.flatten(1), dim=1) for t in gap.values()]
    return replace(
        plain,
        update=plain.update | {name: minus(t, z_old[name]) for name, t in z.items()},
        keep={"dual": dual, "z": z},
        scalars={"primal_residual": torch.stack(norms).square().sum(0)},
        tracks=("z",),
    )


def minus(z: Tensor, z_old: Tensor) -> Tensor:
    """The difference in the precision of z, in which it is sent; float64."""
    return z.to(torch.float64, copy=True).sub_(z_old).to(z.dtype).double()


@dataclass(frozen=True)
class KeepMean(Advance):
    """The server's model moves by exactly the change of the mean of all z_i, and so stays the mean.

    A server that moves more or less (by a learning rate, by momentum) converges to a point where
    the duals do not sum to zero, which is not the optimum.
    """

    reads_cohort: ClassVar[bool] = False

    def init(self, params: Tree) -> Memory:
        return {}

    def update(self, grads: Tree, memory: Memory, params: Tree, gathered: Gathered) -> Moved:
        moved = torch._foreach_sub(list(params.values()), [grads[name] for name in params])
        return dict(zip(params, moved, strict=True)), memory


@dataclass(frozen=True)
class DualResidual:
    """rho ||x - x_before||"""

    rho: Number

    def __call__(self, before: Tree, after: Tree) -> dict[str, Tensor]:
        moved = torch._foreach_sub([after[name] for name in before], list(before.values()))
        norms = torch.stack(list(torch._foreach_norm(moved)))
        return {"dual_residual": self.rho * torch.linalg.vector_norm(norms.double())}


@dataclass(frozen=True)
class TellStart(Tell):
    """The initial model of the server, which is the z_i of clients never selected."""

    reads_cohort: ClassVar[bool] = False

    def init(self, params: Tree, federation: Federation) -> Memory:
        return {"start": params}

    def update(self, told: Memory, gathered: Gathered) -> Memory:
        return {}


def z_now(params: Tree, told: Memory) -> Tree:
    return params


def z_at_start(params: Tree, told: Memory) -> Tree:
    return told["start"]


First = Callable[[Tree, Memory], Tree]
WARM: dict[str, First] = {"dual": zeros_at_first, "z": z_now}
COLD: dict[str, First] = {"dual": zeros_at_first, "z": z_at_start}
