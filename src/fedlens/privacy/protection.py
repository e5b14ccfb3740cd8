"""What a run does for the privacy of its clients, in numbers, and what its rounds release."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from fedlens.privacy import accountant
from fedlens.privacy.events import Neighbours, Release, Sampling
from fedlens.privacy.mechanisms import Adaptive, Mechanism

DRAWN = ("poisson", "fixed")


@dataclass(frozen=True)
class Protection:
    """What a run does for privacy, in numbers.

    `cohort` clients of `clients` are expected in a round. The noise, and ε, are for `noise_cohort`
    of `population`: those of the simulation, unless it stands for a larger federation.
    """

    noise: float
    clip: float | Adaptive
    mechanism: Mechanism
    sampling: Literal["poisson", "fixed", "all", "cyclic"]
    rounds: int
    clients: int
    cohort: int
    noise_cohort: int
    population: int
    seed: int = 0

    def __post_init__(self) -> None:
        if self.sampling == "all" and self.cohort != self.clients:
            raise ValueError(
                f'privacy.sampling is "all", and {self.cohort} of {self.clients} clients take part '
                'in a round: leave clients.per_round out, or choose "poisson" or "fixed"'
            )
        wants = "cyclic" if self.mechanism.correlated else 'poisson", "fixed" or "all'
        if (self.sampling == "cyclic") != self.mechanism.correlated:
            raise ValueError(
                f'privacy.sampling is "{self.sampling}": with this mechanism choose "{wants}"'
            )
        self.mechanism.check(self.rounds, self.separation)
        if isinstance(self.clip, Adaptive) and self.mechanism.correlated:
            raise ValueError(
                "privacy.clip is adaptive, and noise cancels over rounds only if all have the same "
                "clip: choose a number"
            )

    @property
    def separation(self) -> int:
        """A client that takes part in every turn comes back after at least so many rounds."""
        return self.population // self.noise_cohort

    def released(self, rounds: int) -> list[Release]:
        """What the first rounds cost together."""
        drawn = self.sampling in DRAWN
        sampling: Sampling = "all"
        neighbours: Neighbours = "add-remove"
        if self.sampling == "poisson":
            sampling = "poisson"
        if self.sampling == "fixed":
            sampling, neighbours = "fixed", "replace"
        rate = self.noise_cohort / self.population if drawn else 1.0
        if self.mechanism.correlated:
            squared = self._squared(rounds)
            return [Release(self.noise / math.sqrt(squared))] if squared else []
        return [Release(self.noise, sampling, rate, neighbours, rounds)]

    def release(self, round: int) -> Release | None:
        """What round 0, 1, ... adds to that: None if the rounds before it have paid for it."""
        if not self.mechanism.correlated:
            return self.released(1)[0]
        more = self._squared(round + 1) - self._squared(round)
        return Release(self.noise / math.sqrt(more)) if more else None

    def _squared(self, rounds: int) -> float:
        # In a cycle, every client has the same number of turns, or one more.
        turns = -(-rounds * self.noise_cohort // self.population)
        return self.mechanism.squared(rounds, turns, self.separation) if rounds else 0

    def calibrated(self, epsilon: float, delta: float) -> Protection:
        """The same with the least noise for which all rounds cost at most ε."""
        # Nothing else decides what they cost: runs that differ in it share the answer.
        noise = _noise(replace(self, clip=1.0, noise=0.0, seed=0), epsilon, delta)
        return replace(self, noise=noise)


@lru_cache(maxsize=64)
def _noise(protection: Protection, epsilon: float, delta: float) -> float:
    noise = accountant.noise_for(
        epsilon, delta, lambda noise: replace(protection, noise=noise).released(protection.rounds)
    )
    return math.ceil(1e4 * noise) / 1e4  # so that the noise that is shown is enough
