"""Partitions that give each client a few classes."""

from __future__ import annotations

import numpy as np

from fedlens.core.federation import Examples, Holdings
from fedlens.data.partitions.dealing import (
    NOBODY,
    Array,
    at_least_one,
    by_label,
    holdings,
    labels_of,
    levelled,
    places,
)


def shards(
    examples: Examples,
    num_classes: int,
    num_clients: int,
    rng: np.random.Generator,
    *,
    per_client: int = 2,
) -> Holdings:
    """Sorted by label and cut into equal shards, `per_client` to a client at random (McMahan).

    A client's shards may be of the same class, and a shard may span two classes; `classes` gives
    each client distinct ones. Shards differ by at most one example.
    """
    labels = labels_of(examples, num_classes, num_clients)
    num_shards = num_clients * at_least_one(per_client, "per_client")
    if num_shards > len(labels):
        raise ValueError(
            f"{num_shards} shards but {len(labels)} examples: "
            "choose fewer clients or a smaller per_client"
        )
    dealt = rng.permutation(np.repeat(np.arange(num_clients), per_client))
    owner = np.empty(len(labels), dtype=np.int64)
    owner[by_label(labels, rng)] = dealt[np.arange(len(labels)) * num_shards // len(labels)]
    return holdings(owner, num_clients)


def classes(
    examples: Examples,
    num_classes: int,
    num_clients: int,
    rng: np.random.Generator,
    *,
    per_client: int,
) -> Holdings:
    """Exactly `per_client` distinct classes at each client, at random.

    All classes have the same number of holders, give or take one; but a class never has more
    holders than examples. It is divided equally among them. When clients are so few that they
    cannot hold every class, the examples of the others are left out.
    """
    labels = labels_of(examples, num_classes, num_clients)
    present, labels, available = np.unique(labels, return_inverse=True, return_counts=True)
    if at_least_one(per_client, "per_client") > len(present):
        raise ValueError(
            f"per_client is {per_client} but there are examples of {len(present)} classes: "
            f"choose at most {len(present)}"
        )
    limits = np.minimum(available, num_clients)
    if limits.sum() < num_clients * per_client:
        raise ValueError(
            f"{num_clients} clients cannot hold {per_client} classes each, as some classes have "
            "few examples: choose fewer clients or a smaller per_client"
        )
    shuffled = rng.permutation(len(present))
    num_holders = np.empty_like(limits)
    num_holders[shuffled] = levelled(limits[shuffled], num_clients * per_client)

    held = _deal_classes(num_holders, num_clients, per_client, rng)
    pair = rng.permutation(held.size)
    holders = (pair // per_client)[np.argsort(held.ravel()[pair], kind="stable")]
    order = by_label(labels, rng)
    place = places(available)
    used = num_holders[labels[order]] > 0
    order, place = order[used], place[used]
    label = labels[order]
    first = np.cumsum(num_holders) - num_holders  # where a class's holders begin in `holders`
    owner = np.full(len(labels), NOBODY)
    owner[order] = holders[first[label] + place % num_holders[label]]
    return holdings(owner, num_clients)


def _deal_classes(
    num_holders: Array, num_clients: int, per_client: int, rng: np.random.Generator
) -> Array:  # [K, per_client]
    """The classes of each client, such that every class has its number of holders.

    A client draws classes with probability proportional to the number of holders they still lack.
    A class that lacks as many holders as there are clients left must be taken; there are never
    more than `per_client` such classes, so the assignment always succeeds.
    """
    lacking = num_holders.copy()
    held = np.empty((num_clients, per_client), dtype=np.int64)
    patience = rng.standard_exponential((num_clients, len(lacking)))
    for client in range(num_clients):
        urgency = lacking / patience[client]
        urgency[lacking == num_clients - client] = np.inf
        held[client] = np.argpartition(-urgency, per_client - 1)[:per_client]
        lacking[held[client]] -= 1
    return rng.permutation(held)
