"""Data sets that define their own clients."""

from __future__ import annotations

from importlib import import_module

from fedlens.config.names import DATASETS, OWN_CLIENTS
from fedlens.config.options import Named
from fedlens.data.places import Source

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
