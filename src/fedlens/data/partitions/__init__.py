"""Partitions: which client holds which examples.

A partition assigns every example to one client or to none. Each partition takes the time of a
sort, uses no rejection sampling, and works for any distribution of the classes. The examples of a
client keep their stored order, whatever the order in which they were assigned. In `fresh` and
`drawn` each client draws independently, in every round or once, and several clients may hold the
same example; `noisy-labels` and `shifted` change the examples themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from fedlens.config.names import DATASETS, OWN_CLIENTS
from fedlens.config.names import PARTITIONS as PARTITIONS
from fedlens.config.options import Named
from fedlens.data.places import Source


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


NAMES_ITS_CLIENTS = ("csv", "hugging-face")  # by the option `client`


def own_clients(dataset: Named) -> str | None:
    """The column that names the clients of a data set, if it has any."""
    options = dataset.options
    if dataset.name in NAMES_ITS_CLIENTS and options.get("client") is not None:
        return str(options["client"])
    if dataset.name == "folder" and options.get("layout") == "site/class":
        return "site"
    if dataset.name in NAMES_ITS_CLIENTS:
        reader = import_module(f"fedlens.data.{DATASETS.modules[dataset.name]}")
        if reader.names_clients(Source().resolve(str(options["path"]))):
            return "client"
    return OWN_CLIENTS.get(dataset.name)


def with_clients(dataset: Named, column: str | None) -> Named:
    """The data set with `column` as its option `client`, if it has that option and it is not set.

    The test split then takes a share from each of these clients, and leaves each some to train on.
    """
    says = dataset.name not in NAMES_ITS_CLIENTS or dataset.options["client"] is not None
    if column is None or says:
        return dataset
    return Named(dataset.name, {**dataset.options, "client": column})
