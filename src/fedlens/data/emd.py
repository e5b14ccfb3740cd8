"""Earth mover's distance between class shares of one client and of all (without PyTorch)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

Array = np.ndarray[Any, Any]
BLOCK = 65_536  # clients per block: millions in a single block take much longer


def emd_per_client(label_counts: ArrayLike, everyone: ArrayLike | None = None) -> Array:
    """The L1 distance, from 0 to 2, of each client's class shares from those of all clients.

    From [K, L] to [K] float64. `everyone` [L] has the counts of all clients, and is needed if
    `label_counts` has only some of them. A client without examples has distance 0.
    """
    counts = np.asarray(label_counts, np.float64)
    sizes = counts.sum(1, keepdims=True)  # [K, 1]
    total = counts.sum(0) if everyone is None else np.asarray(everyone, np.float64)  # [L]
    distances = np.abs(counts / sizes.clip(min=1) - total / max(total.sum(), 1)).sum(1)
    return np.where(sizes[:, 0] > 0, distances, 0)


def emd(label_counts: ArrayLike) -> float:  # [K, L]
    """The mean of the clients' distances, weighted by their examples (Hsu et al. 2020).

    0 if all clients have the same class shares, 2 (1 - 1/L) if each has one of L equal classes.
    """
    counts = np.asarray(label_counts)
    blocks = (counts[first : first + BLOCK] for first in range(0, len(counts), BLOCK))
    return emd_of_blocks(blocks, counts.sum(0))


def emd_of_blocks(blocks: Iterable[Array], everyone: Array) -> float:
    """The same from the counts of some clients at a time, and of all together [L]."""
    total = sum(float(some.sum(1) @ emd_per_client(some, everyone)) for some in blocks)
    return total / max(float(everyone.sum()), 1)
