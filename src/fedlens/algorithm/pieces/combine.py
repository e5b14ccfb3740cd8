"""combine: how uploads become one update. It never normalises: shares are final."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedlens.algorithm.slots import Combine
from fedlens.core import Cohort, Tree
from fedlens.network.layout import Layout


@dataclass(frozen=True)
class WeightedSum(Combine):
    """The sum of share times update. It may overwrite the updates.

    If shares are not those of a mean, `buffers` can still be averaged by n_k / n ("examples").
    """

    buffers: Literal["shares", "examples"] = "shares"
    linear: ClassVar[bool] = True  # sums over parts of the cohort add up to the whole's
    sums_params: ClassVar[bool] = True
    reads_cohort: ClassVar[bool] = False  # but for the buffers of papers with shares of their own

    def __call__(self, updates: Tree, shares: Tensor, cohort: Cohort, layout: Layout) -> Tree:
        combined = {}
        for name, u in updates.items():
            by_examples = self.buffers == "examples" and layout.entries[name].role == "buffer"
            weights = cohort.size_shares if by_examples else shares
            whole = len(u) > 1
            combined[name] = (
                torch.tensordot(weights.to(u), u, dims=1) if whole else u[0].mul_(weights[0])
            )
        return combined
