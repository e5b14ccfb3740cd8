"""Which data sets come with clients of their own."""

from __future__ import annotations

from fedlens.data.csv_files import names_clients
from fedlens.data.places import Source
from fedlens.names import OWN_CLIENTS
from fedlens.options import Named


def own_clients(dataset: Named) -> str | None:
    """The column that names the clients of a data set, if it has any."""
    options = dataset.options
    if dataset.name == "folder" and options.get("layout") == "site/class":
        return "site"
    if dataset.name == "csv" and names_clients(Source().resolve(str(options["path"]))):
        return "client"
    return OWN_CLIENTS.get(dataset.name)
