"""What clients spend whose own steps protect single examples: the largest ε of a client counts.

A client that holds n examples draws each of them with probability q = batch_size / n in every step
of its turns. Its ε follows from q and from how many steps it takes: that others take part makes it
neither larger nor smaller, and neither does who is drawn, on whom nothing is counted.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from fedlens.privacy import accountant
from fedlens.privacy.events import Release

Array = np.ndarray[Any, Any]


class Client(NamedTuple):
    """What a client does with its examples."""

    rate: float  # the probability of each example to be in a batch
    steps: int  # of all its turns

    def released(self, noise: float, count_noise: float) -> list[Release]:
        steps = Release(noise, "poisson", self.rate, count=self.steps)
        return [steps, Release(count_noise)] if count_noise else [steps]


@lru_cache(maxsize=4096)
def _epsilon(client: Client, noise: float, count_noise: float, delta: float) -> float:
    return accountant.epsilon(client.released(noise, count_noise), delta)


@dataclass(frozen=True, eq=False)
class ExampleProtection:
    """What K clients do for the privacy of their examples. Who takes part is known in advance."""

    noise: float  # standard deviation of the noise on the sum of a batch, in clips
    rates: Array  # [K]
    steps: Array  # [K] of one turn
    chosen: Sequence[Array]  # [rounds] of [C], the clients of each round
    count_noise: float = 0.0  # standard deviation of that on label counts, sent once; 0: not sent

    @property
    def rounds(self) -> int:
        return len(self.chosen)

    def turns(self, rounds: int) -> Array:  # [K]
        """How often each client takes part in the first rounds."""
        some = [np.zeros(0, np.int64), *self.chosen[:rounds]]
        return np.bincount(np.concatenate(some), minlength=len(self.rates))

    def epsilon(self, rounds: int, delta: float) -> float:
        """The largest ε of a client after so many rounds."""
        return self._cost(self.dearest(rounds, delta), delta)

    def dearest(self, rounds: int, delta: float) -> Client:
        """The client with the largest ε.

        A group costs at most what its largest rate with its most steps costs. The group that may
        cost most is halved, until it is one client, or has one with both.
        """
        rates, steps = self._sorted(rounds)
        heap: list[tuple[float, int, int]] = []

        def push(first: int, end: int) -> None:
            bound = Client(float(rates[end - 1]), int(steps[first:end].max()))
            heapq.heappush(heap, (-self._cost(bound, delta), first, end))

        push(0, len(rates))
        while True:
            _, first, end = heapq.heappop(heap)
            if steps[end - 1] == steps[first:end].max():
                return Client(float(rates[end - 1]), int(steps[end - 1]))
            middle = (first + end) // 2
            push(first, middle)
            push(middle, end)

    def spread(self, rounds: int, delta: float) -> dict[str, float]:
        """The ε of the clients that spend least, most, and about the median."""
        rates, steps = self._sorted(rounds)
        order = np.argsort(rates**2 * steps, kind="stable")  # by which ε rises, nearly
        least, median = (
            self._cost(Client(float(rates[k]), int(steps[k])), delta)
            for k in (order[0], order[len(order) // 2])
        )
        return {"least": least, "median": median, "most": self.epsilon(rounds, delta)}

    def releases(self, round: int) -> list[Release]:
        """What round 0, 1, ... adds for a client with the largest rate, the most steps and turns:
        no client spends more than all rounds together say so."""
        before, after = (int(self.turns(one).max(initial=0)) for one in (round, round + 1))
        if before == after:
            return []
        steps = (after - before) * int(self.steps.max())
        return [Release(self.noise, "poisson", float(self.rates.max()), count=steps)]

    def calibrated(self, epsilon: float, delta: float) -> ExampleProtection:
        """The same with the least noise for which every client spends at most ε in all rounds."""
        found = replace(self, noise=1.0)
        while True:
            client = found.dearest(self.rounds, delta)
            noise = _noise(client, self.count_noise, epsilon, delta)
            found = replace(self, noise=noise)
            if found.epsilon(self.rounds, delta) <= epsilon:
                return found

    def _sorted(self, rounds: int) -> tuple[Array, Array]:
        """Rates and steps so far, by the rate and then by the steps, of clients that take any."""
        steps = self.turns(rounds) * self.steps
        order = np.lexsort((steps, self.rates))
        order = order[steps[order] > 0]
        if not len(order):  # nobody took part yet
            return np.zeros(1), np.zeros(1, np.int64)
        return self.rates[order], steps[order]

    def _cost(self, client: Client, delta: float) -> float:
        return _epsilon(client, self.noise, self.count_noise, delta) if client.steps else 0.0


@lru_cache(maxsize=256)
def _noise(client: Client, count_noise: float, epsilon: float, delta: float) -> float:
    found = accountant.noise_for(epsilon, delta, lambda noise: client.released(noise, count_noise))
    return math.ceil(1e4 * found) / 1e4  # so that the noise that is shown is enough
