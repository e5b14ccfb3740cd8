"""Helpers shared by the partitions: from labels to owners, and from owners to holdings."""

from __future__ import annotations

import bisect
from typing import Any

import numpy as np
import torch

from fedlens.core.federation import Examples, Holdings

Array = np.ndarray[Any, Any]

NOBODY = -1


def labels_of(examples: Examples, num_classes: int, num_clients: int) -> Array:  # [N]
    """The labels; a ValueError if there are fewer than clients, or one is not a class number."""
    labels: Array = examples.labels.cpu().numpy()
    if num_clients < 1:
        raise ValueError(f"{num_clients} clients: choose at least 1")
    if not len(labels):
        raise ValueError("there are no training examples: give the data set some")
    if num_clients > len(labels):
        raise ValueError(
            f"{num_clients} clients but {len(labels)} examples: "
            "choose no more clients than there are examples"
        )
    if labels.min() < 0 or labels.max() >= num_classes:
        raise ValueError(
            f"labels run from {labels.min()} to {labels.max()}, but there are {num_classes} "
            f"classes: number them from 0 to {num_classes - 1}"
        )
    return labels


def at_least_one(number: int, name: str) -> int:
    """Return `number`; raise ValueError if it is less than one."""
    if number < 1:
        raise ValueError(f"{name} is {number}: choose at least 1")
    return number


def holdings(owner: Array, num_clients: int) -> Holdings:
    """The holdings of the clients; `owner` has the client of each example, or NOBODY."""
    sizes = np.bincount(owner[owner != NOBODY], minlength=num_clients)
    index = np.argsort(owner, kind="stable")[len(owner) - sizes.sum() :]
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    return Holdings(
        torch.from_numpy(index.astype(np.int64)), torch.from_numpy(offsets.astype(np.int64))
    )


def by_label(labels: Array, rng: np.random.Generator) -> Array:  # [N]
    """The positions of the examples, sorted by label and shuffled within each label."""
    shuffled = rng.permutation(len(labels))
    order: Array = shuffled[np.argsort(labels[shuffled], kind="stable")]
    return order


def places(sizes: Array) -> Array:
    """0, 1, 2, ... within each group, for consecutive groups of these sizes."""
    starts: Array = np.repeat(np.cumsum(sizes) - sizes, sizes)
    return np.arange(len(starts)) - starts


def evenly(labels: Array, num_clients: int, rng: np.random.Generator) -> Holdings:
    """Every class spread evenly: its counts, and the clients' sizes, differ by at most one."""
    owner = np.empty(len(labels), dtype=np.int64)
    owner[by_label(labels, rng)] = np.arange(len(labels)) % num_clients
    return holdings(owner, num_clients)


def largest_remainder(total: int, shares: Array) -> Array:
    """`total` times shares that sum to one, as whole numbers that sum to `total`."""
    exact = total * shares
    counts: Array = np.floor(exact).astype(np.int64)
    missing = total - counts.sum()
    counts[np.argsort(counts - exact, kind="stable")[:missing]] += 1
    return counts


def checked_alpha(alpha: float) -> float:
    """Return `alpha`; raise ValueError if it is negative or not a number."""
    if not alpha >= 0:
        raise ValueError(
            f"alpha is {alpha}: choose a number from 0 (most skewed) to inf (all clients alike)"
        )
    return alpha


def log_gamma(shapes: Array, rows: int, rng: np.random.Generator) -> Array:  # [rows, shapes]
    """Logarithms of Gamma draws: the exponentials of a row, normalised, are a Dirichlet draw.

    log Gamma(a) = log Gamma(a + 1) + log(U) / a stays finite where Gamma(a) underflows to zero.
    """
    shapes = np.maximum(shapes, 1e-300)
    size = (rows, len(shapes))
    return np.log(rng.standard_gamma(shapes + 1, size)) - rng.standard_exponential(size) / shapes


def levelled(limits: Array, total: int) -> Array:
    """Whole numbers that sum to `total`, as equal as possible, none above its limit."""

    def sum_at(level: int) -> int:
        return int(np.minimum(limits, level).sum())

    level = bisect.bisect_right(range(int(limits.max()) + 1), total, key=sum_at) - 1
    numbers = np.minimum(limits, level)
    numbers[np.flatnonzero(limits > level)[: total - numbers.sum()]] += 1
    return numbers
