"""What releases cost together: ε for a δ, δ for an ε, and the noise that a target ε needs.

Two output distributions P and Q of neighbouring data sets are told apart by the privacy loss
L = ln P(o)/Q(o), o drawn from P. Its distribution (PLD) gives the privacy profile

    δ(ε) = sup_S P(S) - e^ε Q(S) = E[max(0, 1 - e^(ε - L))],

and the losses of releases one after another add up, so their distributions are convolved.

Every answer is an upper bound. The loss is put on a grid by "connecting the dots" (Doroshenko,
Ghazi, Kamath, Kumar, Manurangsi: Connect the Dots, 2022): the profile, convex in e^ε, is replaced
by its chords between grid points, with an error of second order in the grid's step. Convolution
is by FFT (Koskela, Jälkö, Honkela, 2020) in a window outside of which Chernoff's bound leaves less
than `TAIL`, and that tail, with the rounding of the FFT, counts as an infinite loss. Rounding
needs about 1e-11 for 10,000 rounds: a δ below that gives ε = inf.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from fedlens.privacy.events import Release

Array = np.ndarray[Any, Any]

TAIL = 2.0**-52
REACH = 10.0  # standard deviations of the noise: less than 2e-23 lies beyond
LARGEST = 500.0  # an ε above it counts as infinite, and e^ε below it as a float
STEP = 0.02  # the grid's step, in standard deviations of one release's loss
POINTS = 2**15  # at most, of the loss of one release
SLOPES = 2.0 ** -np.arange(1, 22)  # Chernoff's λ times the step: any of them gives a bound
KEPT = 512  # releases whose losses are remembered: a ledger may have hundreds of noises
ORDERS = np.concatenate([np.linspace(1.05, 12, 220), np.geomspace(12.5, 1024, 120)])  # α


@dataclass(frozen=True, eq=False)
class Losses:
    """A privacy loss distribution on the grid `step` × (first, first + 1, ...)."""

    step: float
    first: int
    mass: Array  # [points]
    infinite: float  # mass at infinity

    @property
    def values(self) -> Array:
        return self.step * np.arange(self.first, self.first + len(self.mass))

    def delta(self, epsilon: float) -> float:
        """δ(ε) = E[max(0, 1 - e^(ε - L))]"""
        above = np.maximum(0.0, -np.expm1(np.minimum(0.0, epsilon - self.values)))
        return min(1.0, self.infinite + float(self.mass @ above))

    def epsilon(self, delta: float) -> float:
        """The least ε ≥ 0 with δ(ε) ≤ δ; between points, δ(ε) = infinite + A - e^ε B."""
        if self.delta(LARGEST) > delta:
            return math.inf
        if self.delta(0.0) <= delta:
            return 0.0
        positive = max(0, 1 - self.first)  # index of the first point above 0
        values, mass = self.values[positive:], self.mass[positive:]
        above = np.cumsum(mass[::-1])[::-1]  # A: from each point on
        scaled = np.cumsum((mass * np.exp(-values))[::-1])[::-1]  # B
        # δ at each point falls, so the first point at which it is small enough ends the interval.
        at_points = self.infinite + above - np.exp(np.minimum(values, LARGEST)) * scaled
        end = int(np.argmax(at_points <= delta))
        return float(np.log((self.infinite + above[end] - delta) / scaled[end]))


def epsilon(events: Sequence[Release], delta: float) -> float:
    """The least ε for which the events together are (ε, δ)-private; inf without noise."""
    check_delta(delta)
    return max(losses.epsilon(delta) for losses in _composed(events))


def delta(events: Sequence[Release], epsilon: float) -> float:
    """The least δ for which the events together are (ε, δ)-private; 1 without noise."""
    if not (math.isfinite(epsilon) and epsilon >= 0):
        raise ValueError(f"epsilon is {epsilon}: it is a finite number, 0 or more")
    return max(losses.delta(epsilon) for losses in _composed(events))


def noise_for(target: float, delta: float, events: Callable[[float], Sequence[Release]]) -> float:
    """The least noise for which `events(noise)` cost at most `target`, to 1e-4 of itself."""
    if not (math.isfinite(target) and target > 0):
        raise ValueError(f"epsilon is {target}: it is a finite number above 0")
    check_delta(delta)
    low, high = 0.0, 1.0
    while epsilon(events(high), delta) > target:
        low, high = high, 2 * high
        if high > 1e9:
            raise ValueError(f"epsilon is {target} at delta {delta}: no noise reaches it")
    while high - low > 1e-4 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if epsilon(events(middle), delta) <= target else (middle, high)
    return high


def rdp(events: Sequence[Release], delta: float) -> float:
    """ε by Rényi divergences: an older and looser bound, to check the other one with.

    Orders add up (Mironov, 2017). That of a Poisson-sampled Gaussian (Mironov, Talwar, Zhang,
    2019) is (α - 1)·D(α) = ln E_Q[(P/Q)^α], here by the trapezoidal rule, and

        ε = D(α) + ln((α - 1)/α) - (ln δ + ln α)/(α - 1)    (Canonne, Kamath, Steinke, 2020).
    """
    check_delta(delta)
    if any(event.neighbours == "replace" and event.sampling != "all" for event in events):
        raise ValueError('neighbours is "replace": rdp knows samples under "add-remove" alone')
    total = np.zeros_like(ORDERS)
    for event in events:
        if event.count and event.rate:
            if not event.noise:
                return math.inf
            total += event.count * _renyi(event)
    return converted(total, delta)


def converted(divergences: Array, delta: float) -> float:
    """ε from the Rényi divergences of all `ORDERS`."""
    logs = math.log(delta) + np.log(ORDERS)
    costs = divergences + np.log1p(-1 / ORDERS) - logs / (ORDERS - 1)
    return max(0.0, float(costs.min()))


def _renyi(event: Release) -> Array:
    scale, rate = _scale(event), event.rate
    if rate == 1:
        result: Array = ORDERS / (2 * scale**2)
        return result
    found = []
    for order in ORDERS:
        step = min(scale, scale**2) / 8
        x = np.arange(-REACH * scale, order + REACH * scale, step)
        logs = order * _log_mixture(x, scale, rate) - (x / scale) ** 2 / 2
        top = logs.max()
        total = np.exp(logs - top).sum() * step / (scale * math.sqrt(2 * math.pi))
        found.append((top + math.log(total)) / (order - 1))
    return np.array(found)


def check_delta(delta: float) -> None:
    if not 0 < delta < 1:
        raise ValueError(f"delta is {delta}: it lies between 0 and 1, best far below 1 / clients")


def _scale(event: Release) -> float:
    """The noise, in units of what one neighbour may move the sum by."""
    moved = 2 if event.neighbours == "replace" and event.sampling != "poisson" else 1
    return event.noise / moved


def _composed(events: Sequence[Release]) -> list[Losses]:
    """The losses of all events together, for each direction of the neighbouring relation."""
    if len({event.neighbours for event in events}) > 1:
        raise ValueError('neighbours are "add-remove" and "replace": one ε is of one relation')
    counts: Counter[Release] = Counter()
    for event in events:
        if event.count and event.rate:
            counts[replace(event, count=1)] += event.count
    if not all(event.noise for event in counts):
        return [Losses(1.0, 0, np.zeros(1), 1.0)]
    if not counts:
        return [Losses(1.0, 0, np.ones(1), 0.0)]
    # Removing one and adding one have different losses; replacing one is the same both ways.
    both = events[0].neighbours == "add-remove"
    return [_convolved(counts, adding) for adding in ((False, True) if both else (False,))]


def _convolved(counts: Counter[Release], adding: bool) -> Losses:
    rounds = counts.total()
    total = sum(count * _variance(event, adding) for event, count in counts.items())
    ranges = [_range(event, adding) for event in counts]
    step = max(STEP * math.sqrt(total / rounds), max(b - a for a, b in ranges) / POINTS)
    # A power of two, so that more rounds of the same event find its losses computed already.
    step = 2.0 ** math.ceil(math.log2(step))
    parts = [(_losses(event, adding, step), count) for event, count in counts.items()]

    moments = sum(count * _moments(part) for part, count in parts)  # [2, slopes]
    bottom, top = np.min((moments - math.log(TAIL)) / SLOPES, axis=1)
    first, last = -math.ceil(bottom), math.ceil(top)
    size = 2 ** math.ceil(math.log2(last - first + 1))

    # What lies below the window comes out at its top, which is safe; what lies above it is the
    # tail that counts as infinite.
    spectrum = np.ones(size // 2 + 1, dtype=complex)
    finite = 0.0
    for part, count in parts:
        places = (part.first + np.arange(len(part.mass))) % size
        spectrum *= np.fft.rfft(np.bincount(places, part.mass, size)) ** count
        finite += count * math.log1p(-part.infinite)
    mass = np.roll(np.fft.irfft(spectrum, size), -(first % size))
    rounding = 4 * TAIL * rounds
    return Losses(step, first, np.maximum(mass, 0.0), -math.expm1(finite) + TAIL + rounding)


@lru_cache(maxsize=KEPT)
def _moments(losses: Losses) -> Array:  # [2, slopes]
    """ln E[e^(-λL)] and ln E[e^(λL)] of the finite losses for each λ of `SLOPES`."""
    kept = losses.mass > 0
    places, logs = losses.values[kept] / losses.step, np.log(losses.mass[kept])
    found = []
    for slope in (*-SLOPES, *SLOPES):
        terms = slope * places + logs
        found.append(terms.max() + math.log(np.exp(terms - terms.max()).sum()))
    return np.array(found).reshape(2, -1)


@lru_cache(maxsize=KEPT)
def _losses(event: Release, adding: bool, step: float) -> Losses:
    """The losses of one release, on a grid."""
    low, high = _range(event, adding)
    first, last = math.floor(low / step), math.ceil(high / step)
    values = step * np.arange(first, last + 1)
    if event.sampling != "fixed":
        return _dots(*_cells(event, adding, values), first, step)
    # Without replacement (Zhu, Dong, Wang, 2022): the profile of removing for ε ≥ 0, of adding
    # for ε < 0, and the rest of the mass at 0.
    removing = _dots(*_cells(event, False, values), first, step)
    adding_one = _dots(*_cells(event, True, values), first, step)
    mass = np.where(values > 0, removing.mass, adding_one.mass)
    mass[-first] = 0.0
    mass[-first] = max(0.0, 1 - mass.sum() - removing.infinite)
    return Losses(step, first, mass, removing.infinite)


def _dots(upper: Array, lower: Array, first: int, step: float) -> Losses:
    """Splits what P and Q have between two points x = e^ε so that both masses stay.

    Of the cell (x0, x1] with masses p and q, x1 (p - x0 q)/(x1 - x0) goes to its upper end. What
    lies above the last point counts as infinite.
    """
    inner, values = upper[1:-1], step * np.arange(first, first + len(upper) - 2)
    raised = (inner - np.exp(np.minimum(values, LARGEST)) * lower[1:-1]) / -math.expm1(-step)
    raised = np.clip(raised, 0.0, inner)
    mass = np.append(inner - raised, 0.0)
    mass[1:] += raised
    mass[0] += upper[0]
    return Losses(step, first, mass, float(upper[-1]))


def _cells(event: Release, adding: bool, values: Array) -> tuple[Array, Array]:
    """The masses of P and Q below, between and above these losses."""
    scale, rate = _scale(event), event.rate
    if adding:
        lower, upper = _cells(event, False, -values[::-1])
        return upper[::-1], lower[::-1]
    x = _inverse(event, values)
    plain, moved = _normal_mass(x / scale), _normal_mass((x - 1) / scale)
    if event.neighbours == "replace" and event.sampling == "poisson":
        opposite = _normal_mass((x + 1) / scale)
        return (1 - rate) * plain + rate * moved, (1 - rate) * plain + rate * opposite
    return (1 - rate) * plain + rate * moved, plain


def _log_mixture(x: Array, scale: float, rate: float) -> Array:
    """ln of ((1 - q) N(0, σ²) + q N(1, σ²)) / N(0, σ²) at x."""
    with np.errstate(divide="ignore"):
        found: Array = np.logaddexp(np.log1p(-rate), np.log(rate) + (2 * x - 1) / (2 * scale**2))
    return found


def _loss_at(event: Release, x: Array) -> Array:
    """The loss at x when one is removed; it grows with x."""
    loss = _log_mixture(x, _scale(event), event.rate)
    if event.neighbours == "replace" and event.sampling == "poisson":
        loss = loss - _log_mixture(-x, _scale(event), event.rate)
    return loss


def _inverse(event: Release, values: Array) -> Array:
    """The x at which the loss is each value; -inf for values below all losses."""
    scale, rate = _scale(event), event.rate
    with np.errstate(divide="ignore", invalid="ignore"):
        if event.neighbours == "replace" and event.sampling == "poisson":
            # c u² + (1 - q)(1 - e^ε) u - c e^ε = 0 with u = e^(x/σ²) and c = q e^(-1/(2σ²)); by
            # symmetry for ε ≥ 0, where u > 0 is found without a difference of like numbers.
            size = np.abs(values)
            half = np.log((1 - rate) / (2 * rate) * -np.expm1(-size)) + 1 / (2 * scale**2)
            root = np.logaddexp(half, np.logaddexp(2 * half, -size) / 2)
            return np.asarray(np.sign(values) * scale**2 * (size + root))
        least = np.log1p(-rate)
        above = np.where(values > least, values - least, 0.0)
        found: Array = 0.5 + scale**2 * (values + np.log(-np.expm1(-above) / rate))
        return found


def _normal_mass(edges: Array) -> Array:
    """The standard normal mass below, between and above increasing edges, exact in the tails."""
    edges = np.concatenate([[-np.inf], edges, [np.inf]])
    tail = np.array([math.erfc(x) / 2 for x in np.abs(edges) / math.sqrt(2)])
    left, right = tail[:-1], tail[1:]
    above, below = edges[:-1] >= 0, edges[1:] <= 0
    found: Array = np.where(above, left - right, np.where(below, right - left, 1 - left - right))
    return found


@lru_cache(maxsize=KEPT)
def _range(event: Release, adding: bool) -> tuple[float, float]:
    scale = _scale(event)
    low, high = _loss_at(event, np.array([-1 - REACH * scale, 1 + REACH * scale]))
    if event.sampling == "fixed":  # whose losses are symmetric
        return -float(high), float(high)
    return (-float(high), -float(low)) if adding else (float(low), float(high))


@lru_cache(maxsize=KEPT)
def _variance(event: Release, adding: bool) -> float:
    scale = _scale(event)
    x = np.linspace(-1 - REACH * scale, 1 + REACH * scale, 4001)
    loss = _loss_at(event, x)
    weight = np.exp(-((x / scale) ** 2) / 2)
    if not adding:
        weight = (1 - event.rate) * weight + event.rate * np.exp(-(((x - 1) / scale) ** 2) / 2)
    weight /= weight.sum()
    mean = float(weight @ loss)
    return float(weight @ (loss - mean) ** 2)
