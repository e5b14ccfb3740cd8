"""select: which clients take part in a round."""

from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from fedlens.algorithm.slots import Select
from fedlens.core import keys
from fedlens.core.federation import Federation

CYCLE, UNSEEN = keys.purpose("cycle"), keys.purpose("unseen")
LARGE = 100_000  # clients: from more, a small cohort is chosen without a draw for each client


class OfCount(Select, Protocol):
    """A choice of as many clients as its field `count` says."""

    count: int

    @property
    def cohort_size(self) -> int:
        return self.count

    def of_size(self, count: int) -> Select:
        one: Any = self
        other: Select = replace(one, count=count)
        return other


@dataclass(frozen=True)
class Uniformly(OfCount):
    """`count` clients, uniformly, without replacement.

    A number is drawn for each client, and the clients with the smallest are taken. From more than
    LARGE clients a small cohort is drawn client by client, and repeated draws are left out, which
    has the same distribution.
    """

    count: int

    def __call__(self, federation: Federation, round: int, key: Tensor) -> Tensor:  # [C]
        clients = federation.num_clients
        if clients > LARGE and self.count <= clients // 8:
            return _different(key, clients, self.count)
        draws = keys.uniform(keys.fold(key.numpy(), np.arange(clients)))
        return _smallest(torch.from_numpy(draws), self.count)


@dataclass(frozen=True)
class AmongSeen(OfCount):
    """`count` clients, uniformly, among all but the `unseen`, which a `seed` sets apart."""

    count: int
    unseen: int
    seed: int

    def set_apart(self, clients: int) -> Tensor:  # [unseen]
        draws = keys.uniform(keys.fold(keys.root(self.seed, UNSEEN), torch.arange(clients)))
        return _smallest(draws, self.unseen)

    def __call__(self, federation: Federation, round: int, key: Tensor) -> Tensor:  # [C]
        clients = federation.num_clients
        draws = keys.uniform(keys.fold(key, torch.arange(clients)))
        draws[self.set_apart(clients)] = torch.inf
        return _smallest(draws, min(self.count, clients - self.unseen))


@dataclass(frozen=True)
class BySize(OfCount):
    """`count` clients, each drawn with a probability proportional to the examples it holds.

    With replacement a client may be drawn twice in a round. Without, the clients with the
    smallest Exp(1) / n_k are taken, so that clients of equal size give exactly the choice that
    `Uniformly` makes; selection is then no longer exactly proportional.
    """

    count: int
    replacement: bool = True

    def __call__(self, federation: Federation, round: int, key: Tensor) -> Tensor:  # [C]
        if self.replacement:
            ends = federation.offsets(round)[1:]
            draws = keys.uniform(keys.fold(key, torch.arange(self.count))) * ends[-1]
            return torch.searchsorted(ends, draws.long(), right=True)
        sizes = federation.sizes(round).double()
        draws = keys.uniform(keys.fold(key, torch.arange(len(sizes))))
        return _smallest(-torch.log1p(-draws) / sizes, self.count)


@dataclass(frozen=True)
class Poisson(Select):
    """Each client with the same probability, whatever the others do: nobody, too, at times."""

    rate: float
    num_clients: int

    @property
    def cohort_size(self) -> int:
        """How many are expected."""
        return max(round(self.rate * self.num_clients), 1)

    def __call__(self, federation: Federation, round: int, key: Tensor) -> Tensor:  # [C]
        draws = keys.uniform(keys.fold(key, torch.arange(federation.num_clients)))
        return torch.nonzero(draws < self.rate)[:, 0]


@dataclass(frozen=True)
class Cyclic(Select):
    """`count` clients after another in a fixed order, drawn once: all have equally many turns.

    A client comes back after at least num_clients // count rounds.
    """

    count: int
    num_clients: int
    seed: int

    @property
    def cohort_size(self) -> int:
        return self.count

    def __call__(self, federation: Federation, round: int, key: Tensor) -> Tensor:  # [C]
        clients = torch.arange(federation.num_clients)
        order = keys.fold(keys.root(self.seed, CYCLE), clients).argsort(stable=True)
        return order[(round * self.count + torch.arange(self.count)) % len(order)]


def _different(key: Tensor, clients: int, count: int) -> Tensor:
    """The first `count` distinct clients among draws from all of them, in the order of draws."""
    found: dict[int, None] = {}
    first = 0
    while len(found) < count:
        draws = keys.uniform(keys.fold(key, torch.arange(first, first + count)))
        found |= dict.fromkeys((draws * clients).long().tolist())
        first += count
    return torch.tensor(list(found)[:count])


def _smallest(numbers: Tensor, count: int) -> Tensor:
    """The indices of the smallest numbers, in rising order, without sorting all of them."""
    return numbers.topk(min(count, len(numbers)), largest=False).indices
