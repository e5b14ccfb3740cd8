"""select: which clients take part in a round."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedlens import keys
from fedlens.core import Federation


@dataclass(frozen=True)
class Uniformly:
    """`count` clients, uniformly, without replacement."""

    count: int

    def __call__(self, federation: Federation, round: int, key: Tensor) -> Tensor:  # [C]
        draws = keys.uniform(keys.fold(key, torch.arange(federation.num_clients)))
        return draws.argsort(stable=True)[: self.count]
