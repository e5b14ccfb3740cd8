"""Secure sums: the server learns the sum of what clients send, and nothing of one client.

A number v of a client, weighted already, is the whole number round(v / step), so that sums have the
same bits in any order, and so that masks that cancel in the sum can hide it (`fleet/secure/`).
The weights of a round add up to at most 1, no number is beyond `clip`, and rounding adds at most
1/2 a client: with step = clip / (2^(bits - 1) - 1 - cohort) no sum needs more than `bits` bits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedlens.algorithm.algorithm import Algorithm
from fedlens.algorithm.pieces import ByExamples, Constant, Equally, WeightedSum
from fedlens.algorithm.slots import ChannelStep, Combine
from fedlens.core import Cohort, Tree, per_row
from fedlens.network.layout import Layout

FEWEST = 3  # clients of a sum: either of two would learn what the other one sent


@dataclass(frozen=True)
class SecureSum(Combine):
    """The sum of share times update, in whole numbers."""

    clip: float  # the largest number that a client may send
    bits: int  # of a number of the sum
    cohort: int
    threshold: float  # the share of a round's clients that must stay until its end
    total: float  # what the shares of a round add up to at most
    linear: ClassVar[bool] = True
    reads_cohort: ClassVar[bool] = False

    @property
    def fewest(self) -> int:
        return max(enough(self.threshold, self.cohort), FEWEST)

    @property
    def step(self) -> float:
        return self.clip / float(2 ** (self.bits - 1) - 1 - self.cohort)

    def check(self, layout: Layout) -> None:
        buffers = [name for name, entry in layout.entries.items() if entry.role == "buffer"]
        if buffers:
            raise ValueError(
                f"secure sums have no place for {buffers[0]}: of counters the server needs the "
                'largest, which is no sum: set norm = "group"'
            )

    def __call__(self, updates: Tree, shares: Tensor, cohort: Cohort, layout: Layout) -> Tree:
        return self.whole(updates, shares / self.total)

    def whole(
        self, tree: Mapping[str, Tensor], weights: Tensor
    ) -> Tree:  # [C, ...] to [...], int64
        """The sum of weight times number over these clients."""
        return {
            name: (t.double() * per_row(weights / self.step, t)).round_().long().sum(0)
            for name, t in tree.items()
        }

    def opened(self, tree: Tree, weight: float) -> Tree:
        """A sum as numbers again, if it is not yet, times what its weights were divided by."""
        return {
            name: t if t.is_floating_point() else t.double().mul_(self.step * weight)
            for name, t in tree.items()
        }

    def peak(self, trees: Sequence[Mapping[str, Tensor]]) -> Tensor:  # [C]
        """The largest number that each client would send; NaN if one is none."""
        each = [
            t.double().abs().reshape(len(t), -1).amax(1) for tree in trees for t in tree.values()
        ]
        return torch.stack(each).amax(0)

    def refused(self, peak: float) -> str | None:
        """Why a client sends nothing, if its largest number is this one."""
        if peak <= self.clip:
            return None
        return f"a number of {peak:.4g}, and aggregation.clip is {self.clip:g}"


def enough(threshold: float, asked: int) -> int:
    """How many of the clients that were asked must stay: such a share, at least two thirds."""
    return max(math.ceil(threshold * asked - 0.01), -(-2 * asked // 3))


def with_secure_sums(
    base: Algorithm, clip: float, bits: int, cohort: int, threshold: float
) -> Algorithm:
    """Any algorithm whose server needs nothing but sums, with weights that clients know."""
    total = TOTALS.get(type(base.weigh))
    if cohort < FEWEST:
        raise ValueError(
            f"{cohort} clients take part in a round, and secure sums need {FEWEST}, for either of "
            "two would learn what the other one sent: let more take part"
        )
    saved = [one for one in base.channel if type(one).num_bits is not ChannelStep.num_bits]
    for needs, why in (
        (type(base.combine) is not WeightedSum, "its server needs the updates one by one"),
        (base.pace, "in asynchronous rounds the server takes updates one by one"),
        (total is None, "what an update counts depends on more than a client knows by itself"),
        (saved, "what its updates leave out, the masks fill in again"),
    ):
        if needs:
            raise ValueError(f"secure sums exclude this algorithm ({why}): choose another one")
    assert total is not None
    return replace(
        base, combine=SecureSum(clip, bits, cohort, threshold, total(base.weigh, cohort))
    )


def _of_constant(weigh: Any, cohort: int) -> float:
    return float(weigh.share) * cohort


TOTALS = {ByExamples: lambda *_: 1.0, Equally: lambda *_: 1.0, Constant: _of_constant}
"""What the shares of a round add up to at most, by how the algorithm weighs."""
