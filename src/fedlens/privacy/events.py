"""What a round released: a fact, apart from what it costs, which `accountant` says.

The values of a `Release` are numbers and words, so a ledger keeps them as they are:
`Release(**record)` is what `dataclasses.asdict` wrote.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Sampling = Literal["poisson", "fixed", "all"]
Neighbours = Literal["add-remove", "replace"]


@dataclass(frozen=True)
class Release:
    """`count` rounds, each a sum of clipped contributions with Gaussian noise.

    `noise` is the noise multiplier: the standard deviation divided by the clip. `sampling` says
    who took part: each with probability `rate` on its own ("poisson"), a share `rate` of a known
    number without replacement ("fixed"), or everybody ("all").

    `neighbours` says which data sets the release must not tell apart: those with and without one
    contribution ("add-remove"; where everybody takes part, or by a public plan, its contribution
    or zeros), or those in which one contribution is another one ("replace"), which moves the sum
    by two clips.
    """

    noise: float
    sampling: Sampling = "all"
    rate: float = 1.0
    neighbours: Neighbours = "add-remove"
    count: int = 1

    def __post_init__(self) -> None:
        if not (math.isfinite(self.noise) and self.noise >= 0):
            raise ValueError(f"noise is {self.noise}: it is a finite number, 0 or more")
        if not 0 <= self.rate <= 1:
            raise ValueError(f"rate is {self.rate}: a share of those there are lies in 0..1")
        if self.sampling not in ("poisson", "fixed", "all"):
            raise ValueError(f'sampling is "{self.sampling}": use "poisson", "fixed" or "all"')
        if self.neighbours not in ("add-remove", "replace"):
            raise ValueError(f'neighbours is "{self.neighbours}": use "add-remove" or "replace"')
        if self.sampling == "all" and self.rate != 1:
            raise ValueError(f'rate is {self.rate}: with sampling "all" it is 1')
        if self.sampling == "fixed" and self.neighbours == "add-remove":
            raise ValueError(
                'sampling is "fixed": it keeps the number, so use neighbours "replace"'
            )
        if self.count < 0:
            raise ValueError(f"count is {self.count}: it is 0 or more")
