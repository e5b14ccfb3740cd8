"""Statistics of a partition: how large and how different its clients are."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedlens.core import Holdings
from fedlens.data.emd import emd


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
