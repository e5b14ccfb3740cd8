"""Partitions: who holds which examples.

A partition gives every example an owner, or none. Each takes the time of a sort, never draws
again until something fits, and works for any distribution of the classes. The examples of a
client stand in their stored order, whatever the order in which they were dealt. `fresh` is a
split that is dealt anew in every round; `noisy-labels` and `shifted` change what is dealt.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fedlens.core import Holdings, Split
from fedlens.data.partitions.altered import Altered, noisy_labels, shifted
from fedlens.data.partitions.by_class import classes, shards
from fedlens.data.partitions.by_column import natural, s2
from fedlens.data.partitions.by_dirichlet import dirichlet, dirichlet_per_class
from fedlens.data.partitions.by_file import published
from fedlens.data.partitions.by_round import fresh
from fedlens.data.partitions.by_size import iid, power_law, proportions, quantity_dirichlet

PARTITIONS: dict[str, Callable[..., Holdings | Split | Altered]] = {
    "iid": iid,
    "proportions": proportions,
    "quantity-dirichlet": quantity_dirichlet,
    "power-law": power_law,
    "shards": shards,
    "classes": classes,
    "dirichlet": dirichlet,
    "dirichlet-per-class": dirichlet_per_class,
    "natural": natural,
    "s2": s2,
    "published": published,
    "fresh": fresh,
    "noisy-labels": noisy_labels,
    "shifted": shifted,
}


def finds_clients(name: Any, options: Mapping[str, Any]) -> bool:
    """Whether a partition finds its clients in the data: nobody chooses how many there are."""
    of = options.get("of")
    if isinstance(of, Mapping):
        return finds_clients(of.get("name"), of)
    return (of or name) in ("natural", "published", "s2")


__all__ = ["PARTITIONS", "Altered", "finds_clients"]
