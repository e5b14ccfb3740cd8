"""Noise that is correlated over rounds, so that it partly cancels in the model, their sum.

A matrix mechanism (Denisov, McMahan, Rush, Smith, Thakurta, 2022) takes a strategy C. Of the
clipped sums g_1..g_T of the rounds it releases C g + z, with independent noise z of standard
deviation `noise` × clip, whatever follows from that costs nothing more, and the model follows the
sums g + C⁻¹z. The privacy is that of one Gaussian release, `Release(noise / sensitivity)`, where

    sensitivity = the longest C u, u being 1 in the rounds that one client takes part in, else 0

and the entries of C'C are at least 0. Nobody is sampled at random: what counts is how often one
client takes part, and how many rounds apart (its `separation`: 1 is every round).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

LARGEST = 1024  # rounds that are solved for; more of them stretch the solution
ITERATIONS = 150
ENOUGH = 1e-5  # an improvement, as a share of the loss, that ends the search


@dataclass(frozen=True)
class Tree:
    """Tree aggregation (DP-FTRL: Kairouz, McMahan, Song, Thakkar, Thakurta, Xu, 2021).

    Rounds are the leaves of binary trees with `restart` leaves each, and every node that covers
    2^l rounds has noise of its own. The sum of the first t rounds is a sum of whole nodes, one for
    each bit of t, so its noise grows with log t. A tree restarts after `restart` rounds: finished
    ones stay in the sum, so a client may take part once in each at no more than its share.
    """

    rounds: int
    restart: int

    def __post_init__(self) -> None:
        if not 1 <= self.restart <= self.rounds:
            raise ValueError(f"restart is {self.restart}: it lies in 1..{self.rounds} rounds")

    def sensitivity(self, participations: int, separation: int) -> float:
        """At most this: a node of n rounds has one client at most ⌈n / separation⌉ times."""
        times = min(participations, -(-self.rounds // separation))
        squared = 0
        for level in range(self.restart.bit_length()):
            most = min(times, -(-(2**level) // separation))
            squared += times // most * most**2 + (times % most) ** 2
        return math.sqrt(squared)


@dataclass(frozen=True, eq=False)
class Banded:
    """A lower triangular C of few bands with columns of norm 1: `columns[s, j]` is C[s + j, s].

    Rounds at least as far apart as there are bands have columns that do not overlap, so k of
    them have the sensitivity √k (Choquette-Choo, Ganesh, McKenna, McMahan, Rush, Thakurta, Xu:
    (Amplified) Banded Matrix Factorization, 2023).
    """

    columns: Array  # [rounds, bands]

    @property
    def matrix(self) -> Array:  # [rounds, rounds]
        rounds, bands = self.columns.shape
        found = np.zeros((rounds, rounds))
        for j in range(bands):
            found[np.arange(j, rounds), np.arange(rounds - j)] = self.columns[: rounds - j, j]
        return found

    def noise(self, round: int, fresh: Any, past: Sequence[Any]) -> Any:
        """The noise x of round 0, 1, ... from its independent noise z and the x of earlier rounds.

        C x = z gives x_t = (z_t - Σ C[t, t - j] x_(t - j)) / C[t, t]. The latest of `past` is
        last; only bands - 1 of them are needed.
        """
        j = np.arange(min(self.columns.shape[1], round + 1))
        diagonal, *others = self.columns[round - j, j].tolist()
        for weight, earlier in zip(others, reversed(past), strict=False):
            fresh = fresh - weight * earlier
        return fresh / diagonal


def error(strategy: Array) -> float:
    """The mean variance of the noise in the sum of rounds 1..t, over t, for z of variance 1."""
    return float(np.square(np.cumsum(np.linalg.inv(strategy), axis=0)).sum() / len(strategy))


def banded(rounds: int, bands: int) -> Banded:
    """The banded strategy with (almost) the least error.

    With X = C'C, whose diagonal is 1 and which has as many bands, the error ‖A C⁻¹‖² = tr(A'A X⁻¹)
    is convex (A sums over rounds). It is lowered by L-BFGS from the closed form: the square root of
    A, whose coefficients are binom(2j, j) / 4^j, cut off after the bands (Kalinin and Lampert,
    2024), with columns of norm 1. For more than `LARGEST` rounds the bands of C found for that
    many are stretched, for a few per cent more error.
    """
    solved = min(rounds, LARGEST)
    if not 1 <= bands <= solved:
        raise ValueError(f"bands is {bands}: it lies in 1..{solved} for {rounds} rounds")
    j = np.arange(1, bands)
    root = np.cumprod(np.append(1.0, (2 * j - 1) / (2 * j)))
    columns = _normalised(np.tile(root, (solved, 1)))
    if bands > 1:
        start = Banded(columns).matrix
        bands_of_x = np.concatenate([np.diagonal(start.T @ start, k) for k in j])
        found = _minimised(lambda x: _loss(x, solved, bands), bands_of_x)
        strategy = strategy_of(_gram(found, solved, bands))
        columns = _padded([np.diagonal(strategy, -k) for k in range(bands)])
    if solved < rounds:
        columns = _normalised(
            _padded([_stretched(columns[: solved - k, k], rounds - k) for k in range(bands)])
        )
    return Banded(columns)


def _padded(bands: list[Array]) -> Array:
    """Columns of a strategy from its bands, the diagonal first; what lies below it is 0."""
    rounds = len(bands[0])
    return np.stack([np.pad(band, (0, rounds - len(band))) for band in bands], axis=1)


def _stretched(band: Array, length: int) -> Array:
    found: Array = np.interp(np.linspace(0, 1, length), np.linspace(0, 1, len(band)), band)
    return found


def _normalised(columns: Array) -> Array:
    rounds, bands = columns.shape
    inside = np.where(np.add.outer(np.arange(rounds), np.arange(bands)) < rounds, columns, 0.0)
    found: Array = inside / np.linalg.norm(inside, axis=1, keepdims=True)
    return found


def strategy_of(gram: Array) -> Array:
    """The lower triangular C with C'C = X.

    Cholesky's X = LL' has the order of the factors the other way: C = L would have rows and not
    columns of norm 1. So both axes are reversed before it and, after a transpose, again.
    """
    reversed_factor: Array = np.linalg.cholesky(gram[::-1, ::-1])
    return reversed_factor.T[::-1, ::-1]


def _gram(x: Array, rounds: int, bands: int) -> Array:
    """X from what is above its diagonal, band after band."""
    gram = np.eye(rounds)
    start = 0
    for k in range(1, bands):
        i = np.arange(rounds - k)
        gram[i, i + k] = gram[i + k, i] = x[start : start + len(i)]
        start += len(i)
    return gram


def _loss(x: Array, rounds: int, bands: int) -> tuple[float, Array]:
    """tr(A'A X⁻¹) and its gradient -X⁻¹A'A X⁻¹ at the bands; inf where X is not positive."""
    try:
        strategy = strategy_of(_gram(x, rounds, bands))
    except np.linalg.LinAlgError:
        return math.inf, x
    # With B = A C⁻¹ and W = C⁻¹ B', the loss is ‖B‖² and the gradient -W W'.
    half = np.cumsum(_solved(strategy, np.eye(rounds), bands), axis=0)
    whole = _solved(strategy, half.T, bands)
    slopes = [np.einsum("ij,ij->i", whole[:-k], whole[k:]) for k in range(1, bands)]
    return float(np.square(half).sum()), -2 * np.concatenate(slopes)


def _solved(strategy: Array, right: Array, bands: int) -> Array:
    """C⁻¹ R for a banded C, row by row; by `einsum`, for threads of BLAS would only wait here."""
    found = np.empty(right.shape)
    for t, row in enumerate(right):
        before = slice(max(0, t - bands + 1), t)
        known = np.einsum("j,jk->k", strategy[t, before], found[before])
        found[t] = (row - known) / strategy[t, t]
    return found


def _minimised(function: Callable[[Array], tuple[float, Array]], x: Array) -> Array:
    """L-BFGS (Nocedal, 1980) with steps halved until the function falls enough."""
    value, slope = function(x)
    memory: deque[tuple[Array, Array]] = deque(maxlen=20)
    for _ in range(ITERATIONS):
        direction, kept = -slope, []
        for moved, turned in reversed(memory):
            kept.append(moved @ direction / (moved @ turned))
            direction = direction - kept[-1] * turned
        if memory:
            moved, turned = memory[-1]
            direction = direction * (moved @ turned / (turned @ turned))
        else:
            direction = direction * 0.1 / np.abs(direction).max()
        for moved, turned in memory:
            direction = direction + (kept.pop() - turned @ direction / (moved @ turned)) * moved
        step, falls = 1.0, slope @ direction
        while True:
            new_value, new_slope = function(x + step * direction)
            if new_value <= value + 1e-4 * step * falls or step < 1e-8:
                break
            step /= 2
        if step < 1e-8 or not math.isfinite(new_value):
            break
        moved, turned = step * direction, new_slope - slope
        if moved @ turned > 0:
            memory.append((moved, turned))
        gain = value - new_value
        x, value, slope = x + moved, new_value, new_slope
        if gain < ENOUGH * value:
            break
    return x
