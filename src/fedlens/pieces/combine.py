"""combine: how uploads become one update. It never normalises: shares are final."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedlens.core import Cohort, Tree
from fedlens.layout import Layout


@dataclass(frozen=True)
class WeightedSum:
    """The sum of share times update. It may write over the updates."""

    linear: ClassVar[bool] = True  # sums over parts of the cohort add up to the whole's
    uses_shares: ClassVar[bool] = True

    def __call__(self, updates: Tree, shares: Tensor, cohort: Cohort, layout: Layout) -> Tree:
        return {
            name: torch.tensordot(shares.to(u), u, dims=1) if len(u) > 1 else u[0].mul_(shares[0])
            for name, u in updates.items()
        }
