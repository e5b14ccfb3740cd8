"""Partitions that ignore labels: clients differ only in size and by chance."""

from __future__ import annotations

import math
from typing import Literal

import numpy as np

from fedlens.core.federation import Examples, Holdings
from fedlens.data.partitions.dealing import (
    NOBODY,
    Array,
    checked_alpha,
    holdings,
    labels_of,
    largest_remainder,
    log_gamma,
)


def iid(
    examples: Examples, num_classes: int, num_clients: int, rng: np.random.Generator
) -> Holdings:
    """Examples shuffled and dealt one by one: sizes differ by at most one."""
    num_examples = len(labels_of(examples, num_classes, num_clients))
    return holdings(rng.permutation(num_examples) % num_clients, num_clients)


def proportions(
    examples: Examples,
    num_classes: int,
    num_clients: int,
    rng: np.random.Generator,
    *,
    sizes: Literal["homogeneous", "low", "high"] | list[float] = "homogeneous",
    mode: Literal["renormalise", "truncate"] = "renormalise",
    order: Literal["shuffled", "stored"] = "shuffled",
) -> Holdings:
    """Clients of chosen sizes, whatever the classes: a skew of quantity.

    `homogeneous` clients are equal. `low` is .01, .03, .05, ..., .19 for ten clients, and goes on
    in steps of .02 for more. `high` is nine times .01, and .91 for the last client; with more than
    ten clients the last still has .91, and the others share .09 equally. Fewer than ten clients
    take the first of the ten, so that fewer than ten `high` clients are all equal. A list gives a
    proportion for each client.

    `renormalise` scales the clients' proportions to sum to one: every example is held. `truncate`
    does not, as in the paper's code: five `low` clients hold a quarter of the examples, and sizes
    are rounded down. `stored` cuts slices from the stored order, as that code does; `shuffled`
    shuffles first.
    """
    num_examples = len(labels_of(examples, num_classes, num_clients))
    listed = _proportions(sizes, num_clients)
    chosen = listed[:num_clients]
    if mode == "truncate":
        # The margin keeps 3500 from becoming 3499 when the quotient has a rounding error.
        held = np.floor(num_examples * chosen / listed.sum() + 1e-6).astype(np.int64)
    else:
        held = largest_remainder(num_examples, chosen / chosen.sum())
    if not held.all():
        raise ValueError(
            f"{np.sum(held == 0)} of {num_clients} clients would hold none of {num_examples} "
            "examples: choose fewer clients, or more equal sizes"
        )
    owner = np.full(num_examples, NOBODY)
    owner[: held.sum()] = np.repeat(np.arange(num_clients), held)
    return holdings(rng.permutation(owner) if order == "shuffled" else owner, num_clients)


def quantity_dirichlet(
    examples: Examples,
    num_classes: int,
    num_clients: int,
    rng: np.random.Generator,
    *,
    alpha: float,
) -> Holdings:
    """Sizes ~ Dir(alpha), whatever the classes: small alphas give most examples to a few clients.

    Every client has at least one. With alpha = 0 one client has all others, with inf all are equal.
    """
    num_examples = len(labels_of(examples, num_classes, num_clients))
    if checked_alpha(alpha) == math.inf:
        shares = np.ones(num_clients)
    else:
        log_shares = log_gamma(np.array([alpha]), num_clients, rng)[:, 0]
        shares = np.exp(log_shares - log_shares.max())
    return _shuffled(_sizes(num_examples, shares), rng)


def power_law(
    examples: Examples,
    num_classes: int,
    num_clients: int,
    rng: np.random.Generator,
    *,
    exponent: float,
) -> Holdings:
    """Client k, from 1, has a size in proportion to k to the power of -exponent, at least one."""
    num_examples = len(labels_of(examples, num_classes, num_clients))
    if not 0 <= exponent < math.inf:
        raise ValueError(f"exponent is {exponent}: choose 0 (all clients equal) or more")
    shares = np.exp(-exponent * np.log(np.arange(1.0, num_clients + 1)))
    return _shuffled(_sizes(num_examples, shares), rng)


def _sizes(num_examples: int, shares: Array) -> Array:  # [K]
    """Client sizes: one example for each client, and the others in proportion to `shares`."""
    return 1 + largest_remainder(num_examples - len(shares), shares / shares.sum())


def _shuffled(sizes: Array, rng: np.random.Generator) -> Holdings:
    owner = rng.permutation(np.repeat(np.arange(len(sizes)), sizes))
    return holdings(owner, len(sizes))


def _proportions(sizes: str | list[float], num_clients: int) -> Array:
    """The list of proportions. `low` and `high` give at least ten, whatever `num_clients`."""
    length = max(num_clients, 10)
    if sizes == "homogeneous":
        return np.ones(num_clients)
    if sizes == "low":
        return np.arange(1.0, 2 * length, 2)
    if sizes == "high":
        return np.append(np.full(length - 1, 9 / (length - 1)), 91.0)
    if isinstance(sizes, str):
        raise ValueError(
            f"sizes is {sizes!r}: choose homogeneous, low or high, or list a proportion per client"
        )
    if len(sizes) != num_clients:
        raise ValueError(
            f"sizes lists {len(sizes)} proportions for {num_clients} clients: "
            "list one for each client"
        )
    for size in sizes:
        if not 0 < size < math.inf:
            raise ValueError(f"sizes has {size}: every proportion must be above 0")
    return np.array(sizes, dtype=np.float64)
