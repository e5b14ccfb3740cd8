"""Statistics of a partition: how large and how different its clients are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedlens.core.federation import MOST_DESCRIBED, Federation, Holdings
from fedlens.data.emd import BLOCK, emd, emd_of_blocks
from fedlens.data.places import Counted

FEW = 12  # classes or clients named in one line, at most
MOST_ROWS = 40  # clients in a table, at most
WIDTH = 80  # characters in a line of a terminal


@dataclass(frozen=True)
class Counts:
    """Counts of the examples that the clients of a federation hold in the first round."""

    by_class: Tensor  # [K, L] numbers of examples
    sizes: Tensor  # [K] likewise; examples may have several classes, or none
    num_held: int  # examples that at least one client holds
    num_examples: int  # all examples
    names: Sequence[str] | None  # of the clients, if they have names

    @classmethod
    def of(cls, federation: Federation, watch: Counted | None = None) -> Counts:
        """Count in chunks, as there may be millions of clients; `watch` is called with progress."""
        by_class = torch.empty(federation.num_clients, federation.num_classes, dtype=torch.int64)
        is_held, names, done = torch.zeros(len(federation.examples), dtype=torch.bool), None, 0
        for some in federation.parts(0):
            by_class[done : done + len(some)] = federation.label_counts(some)
            is_held[some.index] = True
            names, done = some.names, done + len(some)  # clients with names all come in one part
            if watch is not None:
                watch(done, federation.num_clients)
        return cls(by_class, federation.sizes(0), int(is_held.sum()), len(is_held), names)

    def __len__(self) -> int:
        return len(self.by_class)


def summary(counted: Counts) -> dict[str, Any]:
    """The statistics of a partition, ready for JSON."""
    listed = _listed(len(counted), counted.names, counted.sizes, counted.by_class)
    return listed | {"emd": emd(counted.by_class)}


def counts(
    holdings: Holdings, labels: Tensor | None, num_classes: int, num_clients: int | None = None
) -> dict[str, Any]:
    """The statistics of a federation without the EMD, which needs the counts of every client.

    Without `labels` they say nothing of classes. `num_clients` is given if `holdings` has only some
    of its clients.
    """
    count = num_clients or len(holdings)
    counted = None
    if labels is not None and count <= MOST_DESCRIBED:
        counted = holdings.label_counts(labels, num_classes)
    return _listed(count, holdings.names, holdings.sizes, counted)


def _listed(
    num_clients: int, names: Sequence[str] | None, sizes: Tensor, by_class: Tensor | None
) -> dict[str, Any]:
    """The clients one by one, unless there are more than MOST_DESCRIBED."""
    about: dict[str, Any] = {"num_clients": num_clients}
    if num_clients <= MOST_DESCRIBED:
        about |= {} if names is None else {"client_names": list(names)}
        about |= {"sizes": sizes.tolist()}
        about |= {} if by_class is None else {"label_counts": by_class.tolist()}
    return about


def emd_of(holdings: Holdings, labels: Tensor, num_classes: int) -> float:
    """The `emd` of holdings, computed in blocks so that memory does not grow with the clients."""
    everyone = Holdings.of([holdings.index]).label_counts(labels, num_classes)[0]
    parts = torch.split(torch.arange(len(holdings)), BLOCK)
    blocks = (holdings.take(some).label_counts(labels, num_classes).numpy() for some in parts)
    return emd_of_blocks(blocks, everyone.numpy())


def cross_table(
    counted: Counts, classes: Sequence[str]
) -> tuple[list[str], list[list[str]]] | None:
    """A table of how many examples of each class each client holds: a header, and client rows.

    None if there are too many clients or classes to read, or if clients have no names.
    """
    if counted.names is None or len(counted) > MOST_ROWS or len(classes) > FEW:
        return None
    width = max((WIDTH - max(map(len, counted.names)) - 12) // len(classes) - 2, 3)
    short = [name if len(name) <= width else f"{name[: width - 1]}…" for name in classes]
    rows = [
        [name, *map(str, row), str(size)]
        for name, row, size in zip(
            counted.names, counted.by_class.tolist(), counted.sizes.tolist(), strict=True
        )
    ]
    return ["client", *short, "all"], rows


def describe(counted: Counts) -> list[str]:
    """The statistics in a few lines of text."""
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
