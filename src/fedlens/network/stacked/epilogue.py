"""The operations that follow a layer and are computed together with it."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from fedlens.network.layers import WHOLE, dropout_word
from fedlens.network.pool import Windows


@dataclass(frozen=True)
class KeyedMask:
    """The mask of one call of a keyed dropout layer for C clients: see `layers.keyed_dropout`."""

    keys: Tensor  # [C]
    p: float
    layer: int
    call: int = 0

    @property
    def word(self) -> int:
        """The word that is folded into the keys."""
        return dropout_word(self.layer, self.call)

    @property
    def num_dropped(self) -> int:
        """How many of 2^16 positions are set to 0."""
        return round(self.p * WHOLE)


@dataclass(frozen=True)
class Epilogue:
    """Operations in this order; ReLU and pooling commute, and dropout only follows pooling."""

    around: Tensor | None = None  # the skip connection, which is added
    relu: bool = False
    limit: float = 0.0  # upper limit of the ReLU: 6.0 for ReLU6, 0.0 for none
    pool: Windows | None = None  # of the max-pooling
    mask: KeyedMask | None = None  # of dropout

    def __call__(self, y: Tensor) -> Tensor:
        """Apply all but the dropout, by PyTorch's operations."""
        if self.around is not None:
            y = y + self.around
        if self.relu:
            y = F.hardtanh(y, 0.0, self.limit) if self.limit else F.relu(y)
        return y if self.pool is None else self.pool.maxima(y)
