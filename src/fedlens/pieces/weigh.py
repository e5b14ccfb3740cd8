"""weigh: each upload's final share. Shares need not sum to one; nothing normalises them later."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedlens.core import Cohort, Number


@dataclass(frozen=True)
class ByExamples:
    """n_k / n, where n counts the examples of the cohort or of the whole population."""

    over: Literal["cohort", "population"] = "cohort"

    def __call__(self, cohort: Cohort) -> Tensor:  # [C] float64
        sizes = cohort.sizes.double()
        total = sizes.sum() if self.over == "cohort" else float(cohort.num_examples)
        return sizes / torch.as_tensor(total).clamp(min=1)


@dataclass(frozen=True)
class Constant:
    """The same share for every client, whatever it holds."""

    share: Number

    def __call__(self, cohort: Cohort) -> Tensor:  # [C] float64
        return torch.ones(len(cohort.clients), dtype=torch.float64) * self.share
