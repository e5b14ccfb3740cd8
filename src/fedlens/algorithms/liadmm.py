"""LIADMM (Zhou and Li, 2021, arXiv:2110.15318; paper 4's eqs 4.4 to 4.6) and its CE variant.

ADMM whose local problem is linearised at x: with rho = 1 / gamma and one full-batch step,
x_i = x - gamma grad f_i(x) - u_i and u_i = u_i + x_i - x, where u_i = (gamma / w_i) pi_i. With all
clients in every round x follows optimistic gradient descent, x+ = x - 2 gamma g(x) + gamma
g(x_before), which is stable below gamma L = 2/3. `celiadmm` makes k0 such steps, each followed by
the dual's, between two communications; with k0 = 1 it is `liadmm`.

Paper 4 trains nets with it and fails on non-iid data. We could not obtain its public notebook: the
options of `liadmm` besides gamma, each off by default, are the readings that could explain this.
"""

from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor

from fedlens.algorithm import Algorithm, at_least, paper, same
from fedlens.algorithm.pieces import WHOLE_EPOCHS, ByExamples, Epochs, GradientDescent, Sgd
from fedlens.algorithm.pieces.consensus import Consensus, change
from fedlens.algorithm.slots import Solve, Wraps
from fedlens.algorithms.admm import consensus
from fedlens.core import Local, Memory, Number, Tree, Upload, is_on, per_row, tree_map


@dataclass(frozen=True)
class DualApplied(Wraps):
    """`inner`, with u subtracted from the parameters after every pass, or every step.

    The end of a pass follows from the client's size: it may stop after some of its passes.
    """

    inner: Solve
    batch_size: int | None  # None: every step

    def update(
        self, grads: Tree, memory: Memory, params: Tree, local: Local
    ) -> tuple[Tree, Memory]:
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

    def __call__(self, local: Local) -> Upload:
        u = local.memory["dual"]
        primal = tree_map(lambda v, d: v - d, local.params, u) if self.subtract else local.params
        gap = {name: v - local.anchor[name] for name, v in primal.items()}
        dual = {name: d + gap[name] for name, d in u.items()}
        z_old = local.anchor if self.average == "sampled" else local.memory["z"]
        return change(local, primal, gap, dual, z_old, float(self.dual_weight))


def _gamma(base: Algorithm, gamma: Number | None, name: str) -> Number:
    """gamma as given, else the local learning rate, as in paper 4."""
    if gamma is None:
        if not isinstance(base.solve, Sgd):
            raise ValueError(f"{name} needs gamma: set it in its table")
        gamma = base.solve.lr
    at_least(gamma, 1e-12, f"{name}: gamma")
    return gamma


def _refuse_ignored(base: Algorithm, name: str) -> None:
    """Refuse settings that its steps along the full gradient would ignore, such as momentum."""
    if not isinstance(base.solve, Sgd):
        raise ValueError(
            f'{name} takes plain gradient steps: set local.optimizer = "sgd", and leave local.clip '
            "and other local rules out"
        )
    for key in ("momentum", "weight_decay"):
        if is_on(getattr(base.solve, key)):
            raise ValueError(f"{name} takes plain gradient steps: set local.{key} = 0")


def _passes(base: Algorithm, count: int, name: str) -> Algorithm:
    if not isinstance(base.draw, Epochs) or base.draw.uneven:
        raise ValueError(f"{name} needs whole passes: {WHOLE_EPOCHS}")
    at_least(count, 1, f"{name}: k0")
    return replace(base, draw=replace(base.draw, count=count, whole=True))


@paper
def liadmm(
    base: Algorithm,
    gamma: Number | None = None,
    local: Literal["gradient", "training"] = "gradient",
    dual: Literal["once", "epoch", "step"] = "once",
    average: Literal["all", "sampled"] = "all",
    dual_weight: Number = 1.0,
) -> Algorithm:
    """Agree by linearised ADMM: one full-batch step a round.

    Args:
        gamma: the step; without it, local.lr.
        local: `training` puts local.epochs of SGD in the place of the one step.
        dual: with training, when u is subtracted: once at the end, every epoch, or every step.
        average: `sampled` averages over the clients of the round, not over all clients' last z_i.
        dual_weight: the dual's weight in the average, relative to the primal's.
    """
    step = _gamma(base, gamma, "liadmm")
    if local == "gradient":
        _refuse_ignored(base, "liadmm")
        if dual != "once":
            raise ValueError(f'liadmm: dual is {dual!r}: it needs local = "training"')
        solve: Solve = Consensus(GradientDescent(step), 1 / step)
        amended = consensus(_passes(base, 1, "liadmm"), solve, 1 / step)
        if average == "all" and same(dual_weight, 1.0):
            return amended
        amended = replace(amended, upload=SendReading(False, average, dual_weight))
    else:
        if not isinstance(base.draw, Epochs):
            raise ValueError(f"liadmm: training needs epochs: {WHOLE_EPOCHS}")
        batch_size = base.draw.batch_size if dual == "epoch" else None
        solve = base.solve if dual == "once" else DualApplied(base.solve, batch_size)
        amended = consensus(base, solve, 1 / step)
        amended = replace(amended, upload=SendReading(dual == "once", average, dual_weight))
    return replace(amended, weigh=ByExamples()) if average == "sampled" else amended


@paper
def celiadmm(
    base: Algorithm, gamma: Number | None = None, k0: int = 5, lipschitz: Number = 0.0
) -> Algorithm:
    """Agree by linearised ADMM with k0 local iterations between communications.

    Args:
        gamma: 1 / rho; without it, local.lr.
        k0: local iterations, each one full-batch step and one step of the dual.
        lipschitz: r_i, which makes steps 1 / (r_i + 1 / gamma) long; 0 makes them gamma.
    """
    step = _gamma(base, gamma, "celiadmm")
    _refuse_ignored(base, "celiadmm")
    at_least(lipschitz, 0, "celiadmm: lipschitz")
    solve = Consensus(GradientDescent(1 / (lipschitz + 1 / step), k0), 1 / step, k0)
    return consensus(_passes(base, k0, "celiadmm"), solve, 1 / step)
