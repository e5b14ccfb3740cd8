"""weigh: each upload's final share. Shares need not sum to one; nothing normalises them later."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedlens.algorithm.slots import Over, Weigh
from fedlens.core import Cohort, Number


@dataclass(frozen=True)
class ByExamples(Weigh):
    """n_k / n, where n counts the examples of the cohort, of the clients seen so far, or of all."""

    over: Over = "cohort"

    def __call__(self, cohort: Cohort) -> Tensor:  # [C] float64
        if self.over == "cohort":
            return cohort.size_shares
        return cohort.sizes.double() / max(cohort.num_examples, 1)


@dataclass(frozen=True)
class Equally(Weigh):
    """One over the number of clients in the cohort."""

    def __call__(self, cohort: Cohort) -> Tensor:  # [C] float64
        count = len(cohort.clients)
        return torch.full((count,), 1 / max(count, 1), dtype=torch.float64)


@dataclass(frozen=True)
class Constant(Weigh):
    """The same share for every client, whatever it holds."""

    share: Number

    def __call__(self, cohort: Cohort) -> Tensor:  # [C] float64
        return torch.ones(len(cohort.clients), dtype=torch.float64) * self.share
