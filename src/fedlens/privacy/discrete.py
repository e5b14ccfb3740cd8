"""Noise in whole steps of a grid: low-order bits of floats tell nothing, and secure sums add it.

The discrete Gaussian N_Z(0, σ²) has P(x) ∝ e^(-x²/(2σ²)) on the whole numbers and is as private as
the continuous one (Canonne, Kamath, Steinke: The Discrete Gaussian for Differential Privacy, 2020).
Where each of n clients adds its own, the sum is no discrete Gaussian, but almost: see `epsilon`
(Kairouz, Liu, Steinke: The Distributed Discrete Gaussian Mechanism, 2021).

All lengths are in steps of the grid, and vectors are clipped so that their length holds after they
are rounded: rounding to the nearest step may add √dimension / 2.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np

from fedlens.privacy.accountant import ORDERS, check_delta, converted

Array = np.ndarray[Any, Any]

LARGEST = 2.0**16  # steps: noise whose `thresholds` are a table of ten times as many entries


def epsilon(
    noise: float, clients: int, norm: float, dimension: int, rounds: int, delta: float
) -> float:
    """ε, under adding or removing one, of rounds that each release a sum with discrete noise.

    `noise` is the σ that each of the `clients` whose noise is in the sum adds; those that may
    have failed or lied do not count. `norm` bounds the length of one contribution. With
    τ = 10 Σ_(k < n) e^(-2π²σ² k/(k + 1)), s = norm / (√n σ) and t = s min(√dimension, norm), which
    bounds the sum of absolute values, the Rényi divergence of order α is at most the least of

        α s²/2 + τ d,    α (s² + 2 t τ + τ² d)/2,    α (s + τ √d)²/2.
    """
    check_delta(delta)
    for name, value, least in (
        ("noise", noise, 0.0),
        ("clients", clients, 1),
        ("norm", norm, 0.0),
        ("dimension", dimension, 1),
        ("rounds", rounds, 0),
    ):
        if not (math.isfinite(value) and value >= least):
            raise ValueError(f"{name} is {value}: it is a finite number, {least} or more")
    if not rounds or not norm:
        return 0.0
    if not noise:
        return math.inf
    k = np.arange(1, clients)
    tau = 10 * float(np.exp(-2 * (math.pi * noise) ** 2 * k / (k + 1)).sum())
    share = norm / (math.sqrt(clients) * noise)
    summed = share * min(math.sqrt(dimension), max(norm, 1.0))
    spread = tau * math.sqrt(dimension)
    squared = min(share**2 + 2 * summed * tau + spread**2, (share + spread) ** 2)
    divergences = np.minimum(ORDERS * share**2 / 2 + tau * dimension, ORDERS * squared / 2)
    return converted(rounds * divergences, delta)


@lru_cache(maxsize=8)
def thresholds(noise: float) -> Array:
    """2^63 P(|x| ≥ k) for k from the largest down to 1: summed from the tail, which is exact."""
    sizes = np.arange(math.ceil(9.5 * noise) + 1, 0, -1)
    tails = np.cumsum(np.exp(-((sizes / noise) ** 2) / 2))
    found: Array = np.ceil(2.0**63 * (tails / (tails[-1] + 0.5))).astype(np.uint64)
    return found
