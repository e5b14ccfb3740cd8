"""Differential privacy of clients without a trusted server: each adds a part of the noise itself.

With secure sums the server sees sums of whole numbers alone. A client clips its update so that its
length, rounded to the grid of the sum, is at most `clip`, and adds discrete Gaussian noise to every
number, before masks (Kairouz, Liu, Steinke: The Distributed Discrete Gaussian Mechanism, 2021). The
noise of `honest` clients together is `noise` clips: that of the others, who may be lost or lie, is
not counted on.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from fedlens.algorithm.algorithm import Algorithm
from fedlens.algorithm.private import clipped, with_privacy
from fedlens.algorithm.secure import FEWEST, enough, with_secure_sums
from fedlens.algorithm.slots import ChannelStep, Encoded
from fedlens.core import Memory, Tree, keys
from fedlens.network.layout import Layout
from fedlens.privacy import accountant, discrete
from fedlens.privacy.events import Release
from fedlens.privacy.protection import Protection

NOISE = keys.purpose("noise of a client")
REACH = 9.5  # standard deviations: no drawn number is farther from 0, but for two steps of rounding


@dataclass(frozen=True)
class NoiseOfClients(ChannelStep):
    """The client's half of the mechanism; the server's half is nothing but the secure sum.

    Noise is drawn by key, or by the operating system if `secret`, since the server knows the keys.
    """

    clip: float
    step: float  # of the grid on which a client's numbers are, before they are weighted
    deviation: float  # of a client's noise, in steps
    honest: int
    rounds: int
    delta: float
    secret: bool = False
    covers: ClassVar[bool] = True

    def begin(self, params: Tree) -> Memory:
        self._clip(sum(p.numel() for p in params.values()))  # or a ValueError
        return {}

    def _clip(self, dimension: int) -> float:
        """What is left of the clip once every number may be rounded by half a step."""
        left = self.clip - self.step * math.sqrt(dimension) / 2
        if left < self.clip / 2:
            raise ValueError(
                f"privacy: rounding {dimension:,} numbers to so few bits takes more than half of "
                "the clip: choose more aggregation.bits, or less noise"
            )
        return left

    def encode(self, update: Tree, memory: Memory, client_keys: Tensor, layout: Layout) -> Encoded:
        sent, _ = clipped(update, self._clip(sum(u[0].numel() for u in update.values())))
        places = {name: number for number, name in enumerate(sorted(sent))}
        for name, u in sent.items():
            whole = (u.double() / self.step).round_()
            sent[name] = (whole + self._drawn(client_keys, u, places[name])).mul_(self.step)
        return Encoded(sent)

    def _drawn(self, client_keys: Tensor, like: Tensor, number: int) -> Tensor:
        clients, numel = len(like), like[0].numel()
        if self.secret:
            words = torch.frombuffer(bytearray(os.urandom(8 * clients * numel)), dtype=torch.int64)
        else:
            own = keys.fold(client_keys, NOISE, number)
            words = keys.fold(own[:, None], torch.arange(numel, device=own.device))
        return sample(words.to(like.device), self.deviation).view(like.shape)

    def release(self, round: int) -> Release:
        """As Gaussian noise that costs, over all rounds, what the discrete sums cost."""
        norm = self.clip / self.step
        cost = discrete.epsilon(
            self.deviation, self.honest, norm, MOST_NUMBERS, self.rounds, self.delta
        )
        return Release(_gaussian(cost, self.delta, self.rounds))


MOST_NUMBERS = 2**40  # of a model: ε depends on it only where the grid is far too coarse


@lru_cache(maxsize=64)
def _gaussian(epsilon: float, delta: float, rounds: int) -> float:
    if not math.isfinite(epsilon):
        return 0.0
    return accountant.noise_for(epsilon, delta, lambda noise: [Release(noise, count=rounds)])


def sample(words: Tensor, noise: float) -> Tensor:
    """A discrete Gaussian number of standard deviation `noise` from each word of 64 random bits.

    The lowest bit is the sign and the others choose the size by the inverse of its distribution.
    Probabilities are right to 2^-63, and to `noise` × 2^-53 of themselves.
    """
    reach = _thresholds(noise, words.device)
    sizes = len(reach) - torch.searchsorted(reach, (words >> 1) & (2**63 - 1), right=True)
    found: Tensor = sizes * (1 - 2 * (words & 1))
    return found


@lru_cache(maxsize=8)
def _thresholds(deviation: float, device: torch.device) -> Tensor:
    found = discrete.thresholds(deviation)
    return torch.from_numpy(found.view("int64")).to(device)


def with_noise_of_clients(
    base: Algorithm,
    privacy: Protection,
    bits: int,
    threshold: float,
    without: int | None,
    delta: float,
) -> Algorithm:
    """Any algorithm that `with_privacy` covers, with secure sums to which clients add the noise.

    Args:
        bits: of a number of the sum, at most: no more are used than the noise fills.
        without: how many clients of a round may be lost or lie, and the noise is still enough.
    """
    cohort, clip = privacy.cohort, privacy.clip
    assert isinstance(clip, float)
    fewest = max(enough(threshold, cohort), FEWEST)
    without = max(cohort - fewest, 0) if without is None else without
    if not cohort - fewest <= without < cohort:
        raise ValueError(
            f"privacy.without is {without}: of {cohort} clients in a round {cohort - fewest} may "
            f"be lost by aggregation.threshold, so choose {max(cohort - fewest, 0)} to {cohort - 1}"
        )
    honest = cohort - without
    spread = privacy.noise / math.sqrt(honest)  # of a client's noise, in clips
    step = deviation = largest = 0.0
    for some in range(bits, 0, -1):
        whole = 2 ** (some - 1) - 1 - cohort
        if whole <= 2 * cohort:
            break
        largest = clip * (1 + REACH * spread) / (1 - 2 * cohort / whole)
        step = cohort * largest / whole
        deviation = spread * clip / step
        if deviation <= discrete.LARGEST:
            bits = some
            break
    if not 0 < deviation <= discrete.LARGEST:
        raise ValueError(f"privacy.noise is {privacy.noise:g}: choose a number above 0, below 1e4")
    private = with_privacy(base, privacy)
    noise = NoiseOfClients(clip, step, deviation, honest, privacy.rounds, delta)
    private = replace(private, channel=(*private.channel[:-1], noise))
    return with_secure_sums(private, largest, bits, cohort, threshold)


def drawn_at_a_site(algorithm: Algorithm) -> Algorithm:
    """With noise from the operating system: the server knows all keys."""
    *others, noise = algorithm.channel
    assert isinstance(noise, NoiseOfClients)
    return replace(algorithm, channel=(*others, replace(noise, secret=True)))
