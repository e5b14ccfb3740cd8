"""Statistics of a partition: how large and how different its clients are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fedlens.data.emd import emd, emd_per_client
from fedlens.federation import MOST_DESCRIBED, Dataset, Holdings

BLOCK = 65_536  # clients
FEW = 12  # classes or clients that are named in a line
MOST_ROWS = 40  # clients in a table
WIDTH = 80  # columns of a terminal


def summary(
    holdings: Holdings, labels: Tensor, num_classes: int, num_clients: int | None = None
) -> dict[str, Any]:
    """What there is to know of a partition, ready for JSON.

    `num_clients` is that of the federation, should these be the holdings of some. Of more clients
    than MOST_DESCRIBED none is listed.
    """
    counted = counts(holdings, labels, num_classes, num_clients)
    return counted | {"emd": emd_of(holdings, labels, num_classes)}


def counts(
    holdings: Holdings, labels: Tensor, num_classes: int, num_clients: int | None = None
) -> dict[str, Any]:
    """The same without the EMD, which has to look at every client."""
    about = sizes(holdings, num_clients)
    if about["num_clients"] <= MOST_DESCRIBED:
        about["label_counts"] = holdings.label_counts(labels, num_classes).tolist()
    return about


def sizes(holdings: Holdings, num_clients: int | None = None) -> dict[str, Any]:
    """What there is to know without labels."""
    count = num_clients or len(holdings)
    about: dict[str, Any] = {"num_clients": count}
    if count <= MOST_DESCRIBED:
        about |= {} if holdings.names is None else {"client_names": list(holdings.names)}
        about["sizes"] = holdings.sizes.tolist()
    return about


def emd_of(holdings: Holdings, labels: Tensor, num_classes: int) -> float:
    """`emd` of what clients hold, a block at a time, so that memory does not grow with them."""
    everyone = torch.bincount(labels[holdings.index], minlength=num_classes)
    total = 0.0
    for first in range(0, len(holdings), BLOCK):
        some = torch.arange(first, min(first + BLOCK, len(holdings)))
        each = holdings.take(some).label_counts(labels, num_classes).numpy()
        total += float(each.sum(1) @ emd_per_client(each, everyone))
    return total / max(len(holdings.index), 1)


def found(dataset: Dataset, num_clients: int, names: Sequence[str] | None) -> str:
    """What a data set turned out to hold, in a line: its classes, its images, its clients."""
    shape = "×".join(map(str, dataset.shape))
    clients = f"{num_clients:,} clients{_some(names or ())}"
    return (
        f"{dataset.name}: {dataset.num_classes} classes{_some(dataset.classes)}, "
        f"{len(dataset.train):,} training and {len(dataset.test):,} test images of {shape}, "
        f"{clients}"
    )


def _some(names: Sequence[str]) -> str:
    """The names, in brackets, if there are few."""
    return f" ({', '.join(names)})" if 0 < len(names) <= FEW else ""


def cross_table(
    holdings: Holdings, labels: Tensor, classes: Sequence[str]
) -> tuple[list[str], list[list[str]]] | None:
    """How many examples of each class each client holds: a header, and a row a client.

    None if there are too many of them to be read, or if clients have no names.
    """
    if holdings.names is None or len(holdings) > MOST_ROWS or len(classes) > FEW:
        return None
    counts = holdings.label_counts(labels, len(classes))
    width = max((WIDTH - max(map(len, holdings.names)) - 12) // len(classes) - 2, 3)
    short = [name if len(name) <= width else f"{name[: width - 1]}…" for name in classes]
    rows = [
        [name, *map(str, row), str(sum(row))]
        for name, row in zip(holdings.names, counts.tolist(), strict=True)
    ]
    return ["client", *short, "all"], rows


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
