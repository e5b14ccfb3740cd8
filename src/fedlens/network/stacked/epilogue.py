"""What follows a layer and is computed together with it."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from fedlens.network.layers import WHOLE, dropout_word
from fedlens.network.pool import Windows


@dataclass(frozen=True)
class KeyedMask:
    """What one use of a dropout layer by key sets to 0 for C clients: `layers.keyed_dropout`."""

    keys: Tensor  # [C]
    p: float
    layer: int
    call: int = 0

    @property
    def word(self) -> int:
        """What is folded into the keys."""
        return dropout_word(self.layer, self.call)

    @property
    def num_dropped(self) -> int:
        """Of 2^16 positions."""
        return round(self.p * WHOLE)


@dataclass(frozen=True)
class Epilogue:
    """In this order; ReLU and pooling commute, and dropout only comes behind pooling."""

    around: Tensor | None = None  # what is added: the skip connection
    relu: bool = False
    limit: float = 0.0  # of the ReLU: 6.0 of ReLU6, and 0.0 of one without
    pool: Windows | None = None  # the maximum of each
    mask: KeyedMask | None = None  # of dropout

    def __call__(self, y: Tensor) -> Tensor:
        """By PyTorch alone, without the dropout."""
        if self.around is not None:
            y = y + self.around
        if self.relu:
            y = F.hardtanh(y, 0.0, self.limit) if self.limit else F.relu(y)
        return y if self.pool is None else self.pool.maxima(y)
