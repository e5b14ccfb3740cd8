"""Statistics of a partition: how large and how different its clients are."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedlens.core import Holdings


def emd_per_client(label_counts: Tensor) -> Tensor:  # [K, L] -> [K] float64
    """How far each client's class shares are from everyone's: the L1 distance, from 0 up to 2.

    A client without examples has no shares, and counts as 0.
    """
    counts = label_counts.to(torch.float64)
    sizes = counts.sum(1, keepdim=True)  # [K, 1]
    shares = counts / sizes.clamp(min=1)
    overall = counts.sum(0) / sizes.sum().clamp(min=1)
    return torch.where(sizes[:, 0] > 0, (shares - overall).abs().sum(1), 0)


def emd(label_counts: Tensor) -> float:  # [K, L]
    """The clients' earth mover's distances, each weighted by its examples (Hsu et al. 2020).

    0 if all clients have the same class shares, 2 (1 - 1/L) if each has one of L equal classes.
    """
    sizes = label_counts.sum(1).to(torch.float64)
    return float(sizes @ emd_per_client(label_counts) / sizes.sum().clamp(min=1))


def summary(holdings: Holdings, labels: Tensor, num_classes: int) -> dict[str, Any]:
    """What there is to know of a partition, ready for JSON."""
    label_counts = holdings.label_counts(labels, num_classes)
    names = {} if holdings.names is None else {"client_names": list(holdings.names)}
    return {
        "num_clients": len(holdings),
        **names,
        "sizes": holdings.sizes.tolist(),
        "label_counts": label_counts.tolist(),
        "emd": emd(label_counts),
    }


def describe(holdings: Holdings, labels: Tensor, num_classes: int) -> list[str]:
    """The same in a few lines for a person to read."""
    label_counts = holdings.label_counts(labels, num_classes)
    num_used = int((torch.bincount(holdings.index) > 0).sum())
    return [
        f"{len(holdings):,} clients hold {num_used:,} of {len(labels):,} examples",
        f"examples per client: {_spread(holdings.sizes)}",
        f"classes per client: {_spread((label_counts > 0).sum(1))}",
        f"EMD: {emd(label_counts):.3f} (0: all clients alike; 2: nothing in common)",
    ]


def _spread(numbers: Tensor) -> str:
    low, high = int(numbers.min()), int(numbers.max())
    if low == high:
        return f"{low:,}"
    median = float(numbers.to(torch.float64).quantile(0.5))
    return f"{low:,} to {high:,}, median {median:,.10g}"
