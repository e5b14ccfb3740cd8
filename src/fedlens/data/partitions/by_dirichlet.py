"""Partitions whose class shares are drawn from a Dirichlet distribution.

There are two conventions. With ten equal classes, alpha = 1 in `dirichlet` is as skewed as 0.1 in
`dirichlet-per-class`. Shares are drawn as logarithms, so that any alpha, however small, works.
"""

from __future__ import annotations

import math

import numpy as np

from fedlens.core.federation import Examples, Holdings
from fedlens.data.partitions.dealing import (
    Array,
    at_least_one,
    by_label,
    checked_alpha,
    evenly,
    holdings,
    labels_of,
    largest_remainder,
    levelled,
    log_gamma,
    places,
)


def dirichlet(
    examples: Examples,
    num_classes: int,
    num_clients: int,
    rng: np.random.Generator,
    *,
    alpha: float,
) -> Holdings:
    """Clients of equal size with class shares ~ Dir(alpha p), p the data's own (Hsu).

    A client's counts are its size times its shares, rounded by largest remainder. A class that
    runs out is left out from there on, and its part goes to the others in proportion. With
    alpha = 0 the clients take one class each, in turn, and the fullest class when theirs runs out;
    with alpha = inf every client has the data's own shares.
    """
    labels = labels_of(examples, num_classes, num_clients)
    if checked_alpha(alpha) == math.inf:
        return evenly(labels, num_clients, rng)
    _, labels, available = np.unique(labels, return_inverse=True, return_counts=True)
    sizes = (len(labels) + np.arange(num_clients)[::-1]) // num_clients
    if alpha == 0:
        counts = _one_class_each(sizes, rng.permutation(len(available)), available)
    else:
        concentrations = alpha * (available / len(labels))
        counts = _without_replacement(sizes, log_gamma(concentrations, num_clients, rng), available)
    owner = np.empty(len(labels), dtype=np.int64)
    clients = np.tile(np.arange(num_clients), len(available))
    owner[by_label(labels, rng)] = np.repeat(clients, counts.T.ravel())
    return holdings(owner, num_clients)


def dirichlet_per_class(
    examples: Examples,
    num_classes: int,
    num_clients: int,
    rng: np.random.Generator,
    *,
    alpha: float,
    min_size: int = 1,
) -> Holdings:
    """Each class cut among the clients by shares ~ Dir(alpha), as in NIID-Bench and Flower.

    Sizes differ. Clients with fewer than `min_size` examples are filled up with examples of the
    largest clients, which come down to one level; nothing is drawn again. With alpha = 0 a class
    is at one client, before filling up; with alpha = inf every client has the data's own shares.
    """
    labels = labels_of(examples, num_classes, num_clients)
    if at_least_one(min_size, "min_size") * num_clients > len(labels):
        raise ValueError(
            f"{len(labels)} examples are too few for {num_clients} clients of at least "
            f"{min_size}: choose fewer clients or a smaller min_size"
        )
    if checked_alpha(alpha) == math.inf:
        return evenly(labels, num_clients, rng)
    owner = np.empty(len(labels), dtype=np.int64)
    ends = np.cumsum(np.bincount(labels))
    for members in np.split(by_label(labels, rng), ends[:-1]):
        log_shares = log_gamma(np.array([alpha]), num_clients, rng)[:, 0]
        parts = np.cumsum(np.exp(log_shares - log_shares.max()))
        place = np.searchsorted(parts / parts[-1] * len(members), np.arange(len(members)) + 0.5)
        # The client order differs by class: otherwise rounding always favours the same clients.
        owner[members] = rng.permutation(num_clients)[place]
    return holdings(_filled_up(owner, num_clients, min_size), num_clients)


def _without_replacement(sizes: Array, log_shares: Array, available: Array) -> Array:  # [K, L]
    """Each client's class counts, from its shares and what earlier clients have not taken."""
    counts = np.zeros(log_shares.shape, dtype=np.int64)
    left = available.copy()
    for client, missing in enumerate(sizes.tolist()):
        while missing:  # repeats only if a class ran out: at most K + L times in total
            remaining = np.where(left > 0, log_shares[client], -np.inf)
            shares = np.exp(remaining - remaining.max())
            taken = np.minimum(largest_remainder(missing, shares / shares.sum()), left)
            counts[client] += taken
            left -= taken
            missing -= int(taken.sum())
    return counts


def _one_class_each(sizes: Array, turns: Array, available: Array) -> Array:  # [K, L]
    """Each client's class counts if it takes the next class in `turns`, then the fullest class."""
    counts = np.zeros((len(sizes), len(turns)), dtype=np.int64)
    left = available.copy()
    for client, missing in enumerate(sizes.tolist()):
        label = turns[client % len(turns)]
        while missing:
            taken = min(missing, int(left[label]))
            counts[client, label] += taken
            left[label] -= taken
            missing -= taken
            label = left.argmax()
    return counts


def _filled_up(owner: Array, num_clients: int, min_size: int) -> Array:  # [N]
    """The owners after the largest clients give examples to the clients below `min_size`."""
    sizes = np.bincount(owner, minlength=num_clients)
    missing = np.maximum(min_size - sizes, 0)
    givers = missing == 0
    kept = sizes.copy()
    kept[givers] = levelled(sizes[givers], int(sizes[givers].sum() - missing.sum()))
    order = np.argsort(owner, kind="stable")
    given = order[places(sizes) >= kept[owner[order]]]
    owner[given] = np.repeat(np.arange(num_clients), missing)
    return owner
