"""ADMM, CEADMM (Zhou and Li, 2021, arXiv:2110.15318, eqs 2.16, 3.1 to 3.3) and FedADMM.

Clients of weight w_i = n_i / n agree on one model x: each minimises f_i(v) + (rho / 2) ||v - x +
u_i||^2 by local.epochs of SGD from x, moves its dual by v - x, and sends the change of v + u_i
(`pieces/consensus.py`). `admm` does that once a round, `ceadmm` k0 times.

`fedadmm` averages over the clients seen so far, so that those not yet seen do not keep x near its
start. It works with few clients a round and many local steps, where the linearised forms of
`liadmm` fail. With equal w_i it is what Gong et al. (ICDE 2022, arXiv:2204.03529) describe for
eta = |S| / m. At a fixed point all clients agree, and their gradients sum to zero.
"""

from dataclasses import replace
from typing import Literal

from fedlens.algorithm import Algorithm, at_least, check_pull, paper
from fedlens.algorithm.pieces import ByExamples, PoissonBatches, Sgd, WeightedSum, epochs_of
from fedlens.algorithm.pieces.consensus import (
    COLD,
    WARM,
    Consensus,
    DualResidual,
    KeepMean,
    TellStart,
    send_change,
)
from fedlens.algorithm.slots import Solve
from fedlens.core import Number


def consensus(
    base: Algorithm, solve: Solve, rho: Number, start: Literal["warm", "cold"] = "cold"
) -> Algorithm:
    """`base` with `solve` and everything else that ADMM needs."""
    if isinstance(base.advance, Sgd) and base.advance.lr != 1.0:
        raise ValueError("ADMM's server always takes the whole mean: leave server.lr out")
    warm = start == "warm"
    return replace(
        base,
        solve=solve,
        upload=send_change,
        weigh=ByExamples("seen" if warm else "population"),
        combine=WeightedSum(buffers="examples"),
        advance=KeepMean(),
        tell=base.tell if warm else (*base.tell, TellStart()),
        measures=(*base.measures, DualResidual(rho)),
        memory={**base.memory, **(WARM if warm else COLD)},
    )


def _admm(
    base: Algorithm, name: str, rho: Number, k0: int, start: Literal["warm", "cold"] = "cold"
) -> Algorithm:
    at_least(rho, 0, f"{name}: rho")
    check_pull(base, rho, f"{name}: rho")
    at_least(k0, 1, f"{name}: k0")
    if not (isinstance(base.draw, PoissonBatches) and k0 == 1):  # batches that privacy draws
        draw = epochs_of(base.draw, name)
        base = replace(base, draw=replace(draw, count=draw.count * k0))
    return consensus(base, Consensus(base.solve, rho, k0), rho, start)


@paper
def admm(base: Algorithm, rho: Number = 0.05, k0: int = 1) -> Algorithm:
    """Agree by ADMM, each local problem solved by local.epochs of SGD.

    Args:
        rho: the penalty, sigma_i / w_i.
        k0: local iterations, each of local.epochs, between two communications.
    """
    return _admm(base, "admm", rho, k0)


@paper
def ceadmm(base: Algorithm, rho: Number = 0.05, k0: int = 5) -> Algorithm:
    """Agree by ADMM with k0 local iterations, dual steps included, between communications.

    Args:
        rho: the penalty, sigma_i / w_i.
        k0: local iterations, each of local.epochs and a step of the dual.
    """
    return _admm(base, "ceadmm", rho, k0)


@paper
def fedadmm(
    base: Algorithm, rho: Number = 0.05, k0: int = 1, start: Literal["warm", "cold"] = "warm"
) -> Algorithm:
    """Agree by ADMM when only some clients take part in each round.

    Args:
        rho: the penalty; about (1 - momentum) / (lr * steps).
        k0: local iterations between two communications.
        start: `warm` averages over the clients seen so far, `cold` over all from the start.
    """
    return _admm(base, "fedadmm", rho, k0, start)
