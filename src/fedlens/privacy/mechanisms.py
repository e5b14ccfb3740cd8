"""How the noise of the rounds of a run goes together, and what it then costs.

Noise is counted in clips: the clipped sum of a round moves by at most one if a client is taken out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar, Protocol

from fedlens.privacy import factorisation

if TYPE_CHECKING:  # a plan of privacy needs no PyTorch
    from torch import Tensor

    from fedlens.core import Memory


class Mechanism(Protocol):
    """The noise of each round, made of independent noise; here it is independent itself."""

    correlated: ClassVar[bool] = False
    """Whether noise cancels over rounds. Then nobody is sampled: clients come back after a known
    number of rounds, and the number of rounds is fixed from the start."""

    def check(self, rounds: int, separation: int) -> None:
        """Refuse a run of so many rounds whose clients come back after `separation` of them."""
        return

    def begin(self, rounds: int) -> Memory:
        """What is remembered before the first round."""
        return {}

    def noise(self, round: int, fresh: Tensor, memory: Memory) -> tuple[Tensor, Memory]:
        """The noise of round 0, 1, ... from new independent noise, and what to remember."""
        return fresh, memory

    def squared(self, rounds: int, turns: int, separation: int) -> float:
        """If it is correlated: the squared sensitivity of the first rounds, of which a client has
        so many turns. Here their columns of C have norm 1 and do not overlap."""
        return turns


@dataclass(frozen=True)
class Gaussian(Mechanism):
    """Independent noise in every round."""


@dataclass(frozen=True)
class BandedNoise(Mechanism):
    bands: int
    correlated: ClassVar[bool] = True

    def check(self, rounds: int, separation: int) -> None:
        if not 1 <= self.bands <= rounds:
            raise ValueError(f"bands is {self.bands}: choose 1 to {rounds}, the rounds")
        if separation < self.bands:
            raise ValueError(
                f"bands is {self.bands}, and clients come back after {separation} rounds: choose "
                f"at most {separation} bands, or fewer clients.per_round"
            )

    def begin(self, rounds: int) -> Memory:
        import torch

        # The last digits of a solution depend on the threads of BLAS, so it is remembered.
        columns = torch.from_numpy(_columns(rounds, self.bands))
        return {"columns": {"columns": columns}, "past": {}}

    def noise(self, round: int, fresh: Tensor, memory: Memory) -> tuple[Tensor, Memory]:
        past = memory.get("past", {})  # the latest is called "1"
        known = factorisation.Banded(memory["columns"]["columns"].cpu().numpy())
        found = known.noise(round, fresh, [past[name] for name in sorted(past, key=int)[::-1]])
        later = {"1": found, **{str(int(name) + 1): x for name, x in past.items()}}
        later.pop(str(self.bands), None)
        return found, {**memory, "past": later}


@lru_cache(maxsize=8)
def _columns(rounds: int, bands: int) -> factorisation.Array:
    return factorisation.banded(rounds, bands).columns


@dataclass(frozen=True)
class TreeNoise(Mechanism):
    """Remembers the noise of the nodes that the sum of the rounds is made of, by level."""

    restart: int | None = None
    correlated: ClassVar[bool] = True

    def check(self, rounds: int, separation: int) -> None:
        factorisation.Tree(rounds, self.restart or rounds)

    def noise(self, round: int, fresh: Tensor, memory: Memory) -> tuple[Tensor, Memory]:
        size = round + 1 if self.restart is None else round % self.restart + 1
        level = (size & -size).bit_length() - 1  # of the node that this round completes
        nodes = {int(name): z for name, z in memory.get("nodes", {}).items() if size > 1}
        found = fresh - sum(z for below, z in nodes.items() if below < level)
        kept = {above: z for above, z in nodes.items() if above > level} | {level: fresh}
        return found, {**memory, "nodes": {str(one): kept[one] for one in sorted(kept)}}

    def squared(self, rounds: int, turns: int, separation: int) -> int:
        tree = factorisation.Tree(rounds, min(self.restart or rounds, rounds))
        return round(tree.sensitivity(turns, separation) ** 2)


@dataclass(frozen=True)
class Adaptive:
    """A clip that follows a quantile of the norms (Andrew, Thakkar, McMahan, Ramaswamy, 2021).

    The clients send b - 1/2, where b says whether the norm is at most the clip; the clip is then
    multiplied by exp(-lr (mean of b - quantile)). Sent with noise of standard deviation s, this
    costs as much as a part of the noise z of a round: updates need (z^-2 - (2 s)^-2)^(-1/2).
    """

    quantile: float
    start: float
    lr: float
    count_noise: float | None

    def split(self, noise: float, cohort: int) -> tuple[float, float]:
        """The noise of the updates, and that of the sum of b, for `noise` altogether."""
        count = max(cohort / 20, noise) if self.count_noise is None else self.count_noise
        if not noise:
            return 0.0, count
        if 2 * count <= noise:
            raise ValueError(
                f"clip: count_noise is {count:g}, which costs more than the noise {noise:g} of all "
                f"together allows: choose more than {noise / 2:g}"
            )
        return (noise**-2 - (2 * count) ** -2) ** -0.5, count


def gaussian() -> Gaussian:
    """Independent Gaussian noise in every round."""
    return Gaussian()


def banded(*, bands: int) -> BandedNoise:
    """Noise of which each round takes back a part of that of the last `bands` rounds.

    Args:
        bands: clients come back after at least so many rounds.
    """
    return BandedNoise(bands)


def tree(*, restart: int | None = None) -> TreeNoise:
    """Tree aggregation (DP-FTRL): noise that grows with the logarithm of the rounds.

    Args:
        restart: a new tree begins after so many rounds; without it there is one.
    """
    if restart is not None and restart < 1:
        raise ValueError(f"restart is {restart}: choose 1 round or more")
    return TreeNoise(restart)


def adaptive(
    *,
    quantile: float = 0.5,
    start: float = 0.1,
    lr: float = 0.2,
    count_noise: float | None = None,
) -> Adaptive:
    """A clip that follows a quantile of the norms of updates, counted with noise.

    Args:
        quantile: the share of the updates that are to be shorter than the clip.
        start: the clip of the first round.
        lr: how fast it moves.
        count_noise: of the count, in clients; without it a twentieth of the cohort, or `noise`.
    """
    for name, value, fits in (
        ("quantile", quantile, 0 < quantile < 1),
        ("start", start, 0 < start < math.inf),
        ("lr", lr, 0 < lr < math.inf),
        ("count_noise", count_noise, count_noise is None or 0 < count_noise < math.inf),
    ):
        if not fits:
            between = "between 0 and 1" if name == "quantile" else "above 0"
            raise ValueError(f"clip: {name} is {value}: choose a number {between}")
    return Adaptive(quantile, start, lr, count_noise)
