"""Splits in which each client draws independently from all examples, in every round or once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedlens.config.sections import Count, WholeNumber
from fedlens.core import keys
from fedlens.core.federation import AT_ONCE, Holdings, Lasting, Pool, offsets_of
from fedlens.data.partitions.dealing import labels_of

MOST_CLIENTS = 10**9
_COUNT, _DRAW = keys.purpose("count"), keys.purpose("draw")


@dataclass(frozen=True)
class Fresh:
    """Examples drawn anew for each client and round, a number of each class.

    A draw depends only on the seed, the round and the client. A client never has an example twice
    in a round; two clients may have the same example.
    """

    num_clients: int
    order: Tensor  # [N] the examples, sorted by class
    available: Tensor  # [L] the number of examples of each class that occurs
    low: int  # a client has low to high of each class
    high: int
    key: Tensor

    def holdings(self, round: int, cohort: Tensor) -> Holdings:
        parts = [self._drawn(round, some) for some in torch.split(cohort, AT_ONCE)]
        return parts[0] if len(parts) == 1 else Holdings.joined(parts)

    def _drawn(self, round: int, cohort: Tensor) -> Holdings:
        key = keys.fold(self.key, round, cohort)[:, None]  # [C, 1]
        count = self._counts(key)  # [C, L]
        cards, used = _distinct(keys.fold(key, _DRAW, self._labels), self.available, count)
        # One sort for all clients: the sort key is the client first, then the example.
        owners = torch.arange(len(cohort))[:, None, None].expand_as(cards)[used]
        held = (owners * len(self.order) + self.order[cards[used]]).sort().values
        return Holdings(held % len(self.order), offsets_of(count.sum(1)))

    def sizes(self, round: int) -> Tensor:  # [K]
        if self.low == self.high:
            return torch.tensor(self.low * len(self.available)).expand(self.num_clients)
        sizes = torch.arange(self.num_clients)  # client numbers, overwritten below
        for some in torch.split(sizes, AT_ONCE):  # in chunks: all at once would take K x L numbers
            some.copy_(self._counts(keys.fold(self.key, round, some)[:, None]).sum(1))
        return sizes

    def _counts(self, key: Tensor) -> Tensor:  # [C, 1] -> [C, L]
        """The number of examples of each class that each client draws."""
        spread = self.high - self.low + 1
        return self.low + keys.below(keys.fold(key, _COUNT, self._labels), spread)

    @property
    def _labels(self) -> Tensor:
        return torch.arange(len(self.available))


@dataclass(frozen=True)
class Drawn(Lasting):
    """Clients keep the examples that they draw in the first round.

    The draw is recomputed whenever it is needed, so that nothing is stored per client.
    """

    first: Fresh

    @property
    def num_clients(self) -> int:
        return self.first.num_clients

    def holdings(self, round: int, cohort: Tensor) -> Holdings:
        return self.first.holdings(0, cohort)

    def sizes(self, round: int) -> Tensor:  # [K]
        return self.first.sizes(0)


def fresh(
    pool: Pool,
    *,
    per_class: Count | None = None,
    low: WholeNumber | None = None,
    high: Count | None = None,
) -> Fresh:
    """Other examples in every round, drawn from all by each client on its own (FedNS).

    Of each class it draws `per_class`, or a number between `low` and `high`, each as likely. Two
    clients may draw the same example.
    """
    # Several clients may hold an example, so there may be more of them.
    labels = torch.from_numpy(labels_of(pool._replace(num_clients=1)))
    if per_class is not None and low is None and high is None:
        low = high = per_class
    elif per_class is not None or low is None or high is None:
        raise ValueError(
            f"per_class is {per_class}, low {low} and high {high}: "
            "set per_class, or set both low and high"
        )
    if low > high:
        raise ValueError(f"low is {low} and high {high}: choose a low of no more than high")
    if pool.num_clients > MOST_CLIENTS:
        raise ValueError(f"clients.count is {pool.num_clients:,}: choose at most {MOST_CLIENTS:,}")
    available = torch.bincount(labels)
    present = available[available > 0]
    if int(present.min()) < high:
        label = int((available + len(labels) * (available == 0)).argmin())
        raise ValueError(
            f"class {label} has {int(present.min())} examples, but a client may draw {high} "
            "of each: choose fewer"
        )
    key = keys.root(int(pool.rng.integers(2**63)))
    return Fresh(pool.num_clients, labels.argsort(stable=True), present, low, high, key)


def drawn(
    pool: Pool,
    *,
    per_class: Count | None = None,
    low: WholeNumber | None = None,
    high: Count | None = None,
) -> Drawn:
    """The same examples in every round, drawn from all by each client on its own.

    Of each class it draws `per_class`, or a number between `low` and `high`, each as likely. Two
    clients may draw the same example. No list of who holds what is kept: memory does not grow
    with the clients.
    """
    options = {"per_class": per_class, "low": low, "high": high}
    return Drawn(fresh(pool, **options))


def _distinct(key: Tensor, available: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """For each key [C, L], draw `count` [C, L] distinct examples of a class: draws and a mask.

    Class l has available[l] examples, and examples are numbered across the classes one after
    another. Floyd's algorithm makes every set equally likely: the t-th draw is from the
    first n - count + t examples, and takes the last of them if it repeats an earlier draw. Every
    class has the same number of draws [C, L, T]; the mask says which of them count.
    """
    most = int(count.max())
    drawn = torch.empty(*key.shape, most, dtype=torch.int64)
    for turn in range(most):
        last = available - count + turn
        chance = keys.uniform(keys.fold(key, turn))
        card = torch.minimum((chance * (last + 1)).long(), last)
        repeats = (drawn[..., :turn] == card[..., None]).any(-1)
        drawn[..., turn] = torch.where(repeats, last, card)
    drawn += (available.cumsum(0) - available)[:, None]
    return drawn, torch.arange(most) < count[..., None]
