"""LIADMM (Zhou and Li, 2021, arXiv:2110.15318; paper 4's eqs 4.4 to 4.6) and its CE variant.

ADMM whose local problem is linearised at x: with rho = 1 / gamma and one full-batch step,
x_i = x - gamma grad f_i(x) - u_i and u_i = u_i + x_i - x, where u_i = (gamma / w_i) pi_i. With all
clients in every round x follows optimistic gradient descent, x+ = x - 2 gamma g(x) + gamma
g(x_before), which is stable below gamma L = 2/3. `celiadmm` makes k0 such steps, each followed by
the dual's, between two communications; with k0 = 1 it is `liadmm`.

Paper 4 trains nets with it and fails on non-iid data. We could not obtain its public notebook: the
options of `liadmm` besides gamma, each off by default, are the readings that could explain this.

Algorithm 4 uploads x_i and pi_i *before* the local update. If all clients take part, that is just
another way to count rounds. Of a cohort S it averages *stale* states: z_i = x_i + u_i of the last
round that client i took part in, and z_i = x^0 before its first. So with `upload = "before"` the
model after round t is x^t = sum of n_i z_i over S_t / sum of n_i over S_t, while S_t trains on
x^(t-1). x^1 is the initial model and, if a tenth takes part, 0.9^(t-1) of x^t is untrained.
"""

from dataclasses import replace
from functools import partial
from typing import Literal

from fedlens.algorithm import Algorithm, at_least, paper, same
from fedlens.algorithm.pieces import ByExamples, GradientDescent, Sgd, epochs_of
from fedlens.algorithm.pieces.consensus import Consensus
from fedlens.algorithm.pieces.readings import DualApplied, SendReading, not_begun
from fedlens.algorithm.slots import Solve
from fedlens.algorithms.admm import consensus
from fedlens.core import Number, is_on


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
    at_least(count, 1, f"{name}: k0")
    return replace(base, draw=replace(epochs_of(base.draw, name), count=count, whole=True))


@paper
def liadmm(
    base: Algorithm,
    gamma: Number | None = None,
    local: Literal["gradient", "training"] = "gradient",
    dual: Literal["once", "epoch", "step"] = "once",
    average: Literal["all", "sampled"] = "all",
    dual_weight: Number = 1.0,
    upload: Literal["after", "before"] = "after",
    first_dual: float = 0.0,
) -> Algorithm:
    """Agree by linearised ADMM: one full-batch step a round.

    Args:
        gamma: the step; without it, local.lr.
        local: `training` puts local.epochs of SGD in the place of the one step.
        dual: with training, when u is subtracted: once at the end, every epoch, or every step.
        average: `sampled` averages over the clients of the round, not over all clients' last z_i.
        dual_weight: the dual's weight in the average, relative to the primal's.
        upload: `before` sends the state before the local step, as Algorithm 4 does (sampled only).
        first_dual: u_i at first is normal, with so many times the size of the initial weights.
    """
    step = _gamma(base, gamma, "liadmm")
    if upload == "before" and average == "all":
        raise ValueError('liadmm: upload is "before": it needs average = "sampled"')
    at_least(first_dual, 0, "liadmm: first_dual")
    if first_dual and (local, dual) != ("training", "once"):
        raise ValueError('liadmm: first_dual needs local = "training" and dual = "once"')
    reading = partial(
        SendReading,
        average=average,
        dual_weight=dual_weight,
        before=upload == "before",
        first_dual=first_dual,
    )
    if local == "gradient":
        _refuse_ignored(base, "liadmm")
        if dual != "once":
            raise ValueError(f'liadmm: dual is {dual!r}: it needs local = "training"')
        solve: Solve = Consensus(GradientDescent(step), 1 / step)
        amended = consensus(_passes(base, 1, "liadmm"), solve, 1 / step)
        if average == "all" and same(dual_weight, 1.0):
            return amended
        amended = replace(amended, upload=reading(False))
    else:
        draw = epochs_of(base.draw, "liadmm in training", even=False)
        batch_size = draw.batch_size if dual == "epoch" else None
        solve = base.solve if dual == "once" else DualApplied(base.solve, batch_size)
        amended = consensus(base, solve, 1 / step)
        amended = replace(amended, upload=reading(dual == "once"))
        if first_dual:
            amended = replace(amended, memory={**amended.memory, "begun": not_begun})
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
