"""The earth mover's distance between the classes of clients and those of all (without PyTorch)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

Array = np.ndarray[Any, Any]
BLOCK = 65_536  # clients who are looked at together: of millions, all together take much longer


def emd_per_client(label_counts: ArrayLike, everyone: ArrayLike | None = None) -> Array:
    """How far each client's class shares are from everyone's: the L1 distance, from 0 up to 2.

    From [K, L] to [K] float64. `everyone` [L] are the counts of all clients, if these are some. A
    client without examples has no shares, and counts as 0.
    """
    counts = np.asarray(label_counts, np.float64)
    sizes = counts.sum(1, keepdims=True)  # [K, 1]
    total = counts.sum(0) if everyone is None else np.asarray(everyone, np.float64)  # [L]
    distances = np.abs(counts / sizes.clip(min=1) - total / max(total.sum(), 1)).sum(1)
    return np.where(sizes[:, 0] > 0, distances, 0)


def emd(label_counts: ArrayLike) -> float:  # [K, L]
    """The clients' earth mover's distances, each weighted by its examples (Hsu et al. 2020).

    0 if all clients have the same class shares, 2 (1 - 1/L) if each has one of L equal classes.
    """
    counts = np.asarray(label_counts)
    everyone, total = counts.sum(0), 0.0
    for first in range(0, len(counts), BLOCK):
        some = counts[first : first + BLOCK]
        total += float(some.sum(1) @ emd_per_client(some, everyone))
    return total / max(float(everyone.sum()), 1)
