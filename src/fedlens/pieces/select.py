"""select: which clients take part in a round."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedlens import keys
from fedlens.core import Federation
from fedlens.slots import Select


@dataclass(frozen=True)
class Uniformly(Select):
    """`count` clients, uniformly, without replacement."""

    count: int

    @property
    def cohort_size(self) -> int:
        return self.count

    def of_size(self, count: int) -> Select:
        return replace(self, count=count)

    def __call__(self, federation: Federation, round: int, key: Tensor) -> Tensor:  # [C]
        draws = keys.uniform(keys.fold(key, torch.arange(federation.num_clients)))
        return _smallest(draws, self.count)


@dataclass(frozen=True)
class BySize(Select):
    """`count` clients, each drawn with a probability proportional to the examples it holds.

    With replacement a client may be drawn twice in a round. Without, the clients with the
    smallest Exp(1) / n_k are taken, so that clients of equal size give just the choice that
    `Uniformly` makes; selection is then no longer quite proportional.
    """

    count: int
    replacement: bool = True

    @property
    def cohort_size(self) -> int:
        return self.count

    def of_size(self, count: int) -> Select:
        return replace(self, count=count)

    def __call__(self, federation: Federation, round: int, key: Tensor) -> Tensor:  # [C]
        sizes = federation.sizes(round).double()
        if self.replacement:
            edges = sizes.cumsum(0)
            draws = keys.uniform(keys.fold(key, torch.arange(self.count))) * edges[-1]
            return torch.searchsorted(edges, draws, right=True)
        draws = keys.uniform(keys.fold(key, torch.arange(len(sizes))))
        return _smallest(-torch.log1p(-draws) / sizes, self.count)


def _smallest(numbers: Tensor, count: int) -> Tensor:
    """The places of the smallest numbers, in rising order: without sorting those of all clients."""
    return numbers.topk(min(count, len(numbers)), largest=False).indices
