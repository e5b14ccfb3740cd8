"""Partitions: who holds which examples.

A partition gives every example an owner, or none. Each takes the time of a sort, never draws
again until something fits, and works for any distribution of the classes. The examples of a
client stand in their stored order, whatever the order in which they were dealt. In `fresh`
and `drawn` each client draws on its own, in every round or once, and an example may have several
owners; `noisy-labels` and `shifted` change what is dealt.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedlens.names import PARTITIONS as PARTITIONS


def natural_column(name: Any, options: Mapping[str, Any]) -> str | None:
    """The column whose values are the clients, if that is what the partition is made of."""
    of = options.get("of")
    if isinstance(of, Mapping):
        return natural_column(of.get("name"), of)
    column = options.get("column")
    return column if name == "natural" and isinstance(column, str) else None


def finds_clients(name: Any, options: Mapping[str, Any]) -> bool:
    """Whether a partition finds its clients in the data: nobody chooses how many there are."""
    of = options.get("of")
    if isinstance(of, Mapping):
        return finds_clients(of.get("name"), of)
    return (of or name) in ("natural", "published", "s2")
