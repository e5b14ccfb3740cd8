"""Data sets that define their own clients."""

from __future__ import annotations

from fedlens.data import csv_files, hugging_face
from fedlens.data.places import Source
from fedlens.names import OWN_CLIENTS
from fedlens.options import Named

NAMES_ITS_CLIENTS = ("csv", "hugging-face")  # by the option `client`


def own_clients(dataset: Named) -> str | None:
    """The column that names the clients of a data set, if it has any."""
    options = dataset.options
    if dataset.name in NAMES_ITS_CLIENTS and options.get("client") is not None:
        return str(options["client"])
    if dataset.name == "folder" and options.get("layout") == "site/class":
        return "site"
    readers = {"csv": csv_files.names_clients, "hugging-face": hugging_face.names_clients}
    reader = readers.get(dataset.name)
    if reader is not None and reader(Source().resolve(str(options["path"]))):
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
