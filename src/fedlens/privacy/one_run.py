"""A lower bound of ε from one run with canaries (Steinke, Nasr, Jagielski, NeurIPS 2023).

Of m canaries each is in the run by a fair coin. Whoever audits guesses of r of them whether they
are in, and v guesses are right. If the run is (ε, δ)-private, then (Theorem 5.2, arXiv:2305.08846)

    P[at least v right] <= P[W >= v] + 2 m δ max_i P[v - i <= W < v] / i,   i = 1 .. m,

where W has a binomial distribution of r trials with chance e^ε / (1 + e^ε). An ε for which the
right side is below 1 - confidence is refuted: the bound is the largest of these.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

SHARES = 1.0, 0.5, 0.2, 0.1, 0.05, 0.02, 0.01  # of the canaries, that are guessed
MOST = 50.0  # an ε beyond which nothing is asked


def p_value(epsilon: float, delta: float, canaries: int, guesses: int, right: int) -> float:
    """The most that the chance of so many right guesses can be under (ε, δ)."""
    if not 0 <= right <= guesses <= canaries:
        raise ValueError(f"{right} right of {guesses} guesses of {canaries} canaries: not possible")
    chance = _binomial(guesses, epsilon)
    below = np.cumsum(chance[:right][::-1])  # P[v - i <= W < v] for i = 1 .. v
    steepest = float((below / np.arange(1, right + 1)).max()) if right else 0.0
    return min(1.0, float(chance[right:].sum()) + 2 * canaries * delta * steepest)


def lower_bound(
    canaries: int, guesses: int, right: int, delta: float = 0.0, confidence: float = 0.95
) -> float:
    """The largest ε that the guesses refute; 0 if they refute none."""
    allowed = 1 - confidence
    if p_value(0.0, delta, canaries, guesses, right) > allowed:
        return 0.0
    low, high = 0.0, MOST
    while high - low > 1e-6:
        middle = (low + high) / 2
        refuted = p_value(middle, delta, canaries, guesses, right) <= allowed
        low, high = (middle, high) if refuted else (low, middle)
    return low


def best_bound(
    scores: Array, member: Array, delta: float = 0.0, confidence: float = 0.95
) -> tuple[float, int, int]:
    """The bound, guesses and right ones if the highest scores are guessed in, the lowest out.

    The number of guesses is chosen after the fact, among a few: the confidence is divided by them.
    """
    canaries = len(scores)
    order = np.argsort(-scores, kind="stable")
    sizes = sorted({max(1, round(canaries * share / 2)) for share in SHARES})
    each = 1 - (1 - confidence) / len(sizes)
    found = []
    for half in sizes:
        half = min(half, canaries // 2)
        right = int(member[order[:half]].sum() + (~member[order[canaries - half :]]).sum())
        bound = lower_bound(canaries, 2 * half, right, delta, each)
        found.append((bound, 2 * half, right))
    return max(found)


def _binomial(trials: int, epsilon: float) -> Array:  # [trials + 1]
    """P[W = w] with chance e^ε / (1 + e^ε)."""
    hit, miss = -math.log1p(math.exp(-epsilon)), -epsilon - math.log1p(math.exp(-epsilon))
    w = np.arange(trials + 1)
    logs = np.cumsum(np.log(np.concatenate([[1.0], np.arange(1, trials + 1)])))
    choose = logs[-1] - logs - logs[::-1]
    found: Array = np.exp(choose + w * hit + (trials - w) * miss)
    return found
