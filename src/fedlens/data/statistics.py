"""Statistics of a partition: how large and how different its clients are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedlens.data.emd import BLOCK, emd, emd_per_client
from fedlens.data.places import Counted
from fedlens.federation import MOST_DESCRIBED, Dataset, Federation, Holdings

FEW = 12  # classes or clients that are named in a line
MOST_ROWS = 40  # clients in a table
WIDTH = 80  # columns of a terminal


@dataclass(frozen=True)
class Counts:
    """What the clients of a federation hold in the first round, counted."""

    by_class: Tensor  # [K, L] examples
    num_held: int  # examples that somebody holds
    num_examples: int  # that there are
    names: Sequence[str] | None  # of the clients, where they have any

    @classmethod
    def of(cls, federation: Federation, watch: Counted | None = None) -> Counts:
        """Count some clients at a time, since they may be millions; `watch` is told how many."""
        by_class = torch.empty(federation.num_clients, federation.num_classes, dtype=torch.int64)
        is_held, names, done = torch.zeros(len(federation.examples), dtype=torch.bool), None, 0
        for some in federation.parts(0):
            by_class[done : done + len(some)] = federation.label_counts(some)
            is_held[some.index] = True
            names, done = some.names, done + len(some)  # those with names are all in one part
            if watch is not None:
                watch(done, federation.num_clients)
        return cls(by_class, int(is_held.sum()), len(is_held), names)

    def __len__(self) -> int:
        return len(self.by_class)

    @property
    def sizes(self) -> Tensor:  # [K]
        return self.by_class.sum(1)


def summary(counted: Counts) -> dict[str, Any]:
    """What there is to know of a partition, ready for JSON.

    Of more clients than MOST_DESCRIBED none is listed.
    """
    about: dict[str, Any] = {"num_clients": len(counted)}
    if len(counted) <= MOST_DESCRIBED:
        about |= {} if counted.names is None else {"client_names": list(counted.names)}
        about |= {"sizes": counted.sizes.tolist(), "label_counts": counted.by_class.tolist()}
    return about | {"emd": emd(counted.by_class)}


def counts(
    holdings: Holdings, labels: Tensor, num_classes: int, num_clients: int | None = None
) -> dict[str, Any]:
    """What there is to know of a partition without the EMD, which has to look at every client.

    `num_clients` is that of the federation, should these be the holdings of some. Of more clients
    than MOST_DESCRIBED none is listed.
    """
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


def found(
    dataset: Dataset,
    num_clients: int,
    names: Sequence[str] | None,
    validation: int = 0,
    held_out: int = 0,
) -> str:
    """What a data set turned out to hold, in a line: its classes, its images, its clients.

    `validation` is how many examples are set apart for that, and `held_out` how many training
    examples clients set apart to be tested on.
    """
    shape = "×".join(map(str, dataset.shape))
    clients = f"{num_clients:,} client{'' if num_clients == 1 else 's'}{_some(names or ())}"
    taken = 0 if dataset.validation is not None else validation
    training = f"{len(dataset.train) - taken:,} training"
    if held_out:
        training += f" ({held_out:,} of them held out by clients)"
    counts = [training, *([f"{validation:,} validation"] if validation else [])]
    return (
        f"{dataset.name}: {dataset.num_classes} classes{_some(dataset.classes)}, "
        f"{', '.join(counts)} and {len(dataset.test):,} test images of {shape}, {clients}"
    )


def _some(names: Sequence[str]) -> str:
    """The names, in brackets, if there are few."""
    return f" ({', '.join(names)})" if 0 < len(names) <= FEW else ""


def cross_table(
    counted: Counts, classes: Sequence[str]
) -> tuple[list[str], list[list[str]]] | None:
    """How many examples of each class each client holds: a header, and a row a client.

    None if there are too many of them to be read, or if clients have no names.
    """
    if counted.names is None or len(counted) > MOST_ROWS or len(classes) > FEW:
        return None
    width = max((WIDTH - max(map(len, counted.names)) - 12) // len(classes) - 2, 3)
    short = [name if len(name) <= width else f"{name[: width - 1]}…" for name in classes]
    rows = [
        [name, *map(str, row), str(sum(row))]
        for name, row in zip(counted.names, counted.by_class.tolist(), strict=True)
    ]
    return ["client", *short, "all"], rows


def describe(counted: Counts) -> list[str]:
    """The summary in a few lines for a person to read."""
    return [
        f"{len(counted):,} clients hold {counted.num_held:,} of {counted.num_examples:,} examples",
        f"examples per client: {_spread(counted.sizes)}",
        f"classes per client: {_spread((counted.by_class > 0).sum(1))}",
        f"EMD: {emd(counted.by_class):.3f} (0: all clients alike; 2: nothing in common)",
    ]


def _spread(numbers: Tensor) -> str:
    low, high = int(numbers.min()), int(numbers.max())
    if low == high:
        return f"{low:,}"
    median = float(numbers.to(torch.float64).quantile(0.5))
    return f"{low:,} to {high:,}, median {median:,.10g}"
