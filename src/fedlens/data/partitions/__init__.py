"""Partitions: which client holds which examples.

A partition assigns every example to one client or to none. Each partition takes the time of a
sort, uses no rejection sampling, and works for any distribution of the classes. The examples of a
client keep their stored order, whatever the order in which they were assigned. In `fresh` and
`drawn` each client draws independently, in every round or once, and several clients may hold the
same example; `noisy-labels` and `shifted` change the examples themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedlens.config.names import PARTITIONS as PARTITIONS


def natural_column(name: Any, options: Mapping[str, Any]) -> str | None:
    """The column whose values are the clients, if the partition is `natural` or built on it."""
    of = options.get("of")
    if isinstance(of, Mapping):
        return natural_column(of.get("name"), of)
    column = options.get("column")
    return column if name == "natural" and isinstance(column, str) else None


def finds_clients(name: Any, options: Mapping[str, Any]) -> bool:
    """Whether a partition finds its clients in the data, so that their number is not an option."""
    of = options.get("of")
    if isinstance(of, Mapping):
        return finds_clients(of.get("name"), of)
    return (of or name) in ("natural", "published", "s2")
