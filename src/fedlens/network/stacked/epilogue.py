"""What follows a layer and is computed together with it."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from fedlens.network.pool import Windows


@dataclass(frozen=True)
class Epilogue:
    """In this order; ReLU and pooling commute."""

    around: Tensor | None = None  # what is added: the skip connection
    relu: bool = False
    limit: float = 0.0  # of the ReLU: 6.0 of ReLU6, and 0.0 of one without
    pool: Windows | None = None  # the maximum of each

    def __call__(self, y: Tensor) -> Tensor:
        """By PyTorch alone."""
        if self.around is not None:
            y = y + self.around
        if self.relu:
            y = F.hardtanh(y, 0.0, self.limit) if self.limit else F.relu(y)
        return y if self.pool is None else self.pool.maxima(y)
