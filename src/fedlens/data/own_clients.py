"""Which data sets come with clients of their own."""

from __future__ import annotations

from fedlens.data import csv_files, hugging_face
from fedlens.data.places import Source
from fedlens.names import OWN_CLIENTS
from fedlens.options import Named


def own_clients(dataset: Named) -> str | None:
    """The column that names the clients of a data set, if it has any."""
    options = dataset.options
    if dataset.name == "folder" and options.get("layout") == "site/class":
        return "site"
    readers = {"csv": csv_files.names_clients, "hugging-face": hugging_face.names_clients}
    reader = readers.get(dataset.name)
    if reader is not None and reader(Source().resolve(str(options["path"]))):
        return "client"
    return OWN_CLIENTS.get(dataset.name)
