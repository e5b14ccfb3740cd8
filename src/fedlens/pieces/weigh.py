"""weigh: each upload's final share. Shares need not sum to one; nothing normalises them later."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedlens.core import Cohort, Number


@dataclass(frozen=True)
class ByExamples:
    """n_k / n, where n counts the examples of the cohort, of the clients seen so far, or of all."""

    over: Literal["cohort", "seen", "population"] = "cohort"

    def __call__(self, cohort: Cohort) -> Tensor:  # [C] float64
        if self.over == "cohort":
            return cohort.size_shares
        total = cohort.num_examples_seen if self.over == "seen" else cohort.num_examples
        return cohort.sizes.double() / max(total, 1)


@dataclass(frozen=True)
class Equally:
    """One over the number of clients in the cohort."""

    def __call__(self, cohort: Cohort) -> Tensor:  # [C] float64
        return torch.full((len(cohort.clients),), 1 / len(cohort.clients), dtype=torch.float64)


@dataclass(frozen=True)
class Constant:
    """The same share for every client, whatever it holds."""

    share: Number

    def __call__(self, cohort: Cohort) -> Tensor:  # [C] float64
        return torch.ones(len(cohort.clients), dtype=torch.float64) * self.share
