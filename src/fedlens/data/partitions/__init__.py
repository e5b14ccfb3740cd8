"""Partitions: who holds which examples.

A partition gives every example an owner, or none. Each takes the time of a sort, never draws
again until something fits, and works for any distribution of the classes. The examples of a
client stand in their stored order, whatever the order in which they were dealt.
"""

from __future__ import annotations

from collections.abc import Callable

from fedlens.core import Holdings
from fedlens.data.partitions.by_class import classes, shards
from fedlens.data.partitions.by_dirichlet import dirichlet, dirichlet_per_class
from fedlens.data.partitions.by_size import iid, proportions

PARTITIONS: dict[str, Callable[..., Holdings]] = {
    "iid": iid,
    "proportions": proportions,
    "shards": shards,
    "classes": classes,
    "dirichlet": dirichlet,
    "dirichlet-per-class": dirichlet_per_class,
}

__all__ = [
    "PARTITIONS",
    "classes",
    "dirichlet",
    "dirichlet_per_class",
    "iid",
    "proportions",
    "shards",
]
