"""Data sets by name. Each is a function of a `Source` and of its options."""

from __future__ import annotations

from collections.abc import Callable

from fedlens.core import Dataset
from fedlens.data.csv_files import csv
from fedlens.data.folders import folder, tiny_imagenet
from fedlens.data.handwriting import femnist, omniglot
from fedlens.data.mini import fashion_mnist_mini
from fedlens.data.numpy_files import npz
from fedlens.data.places import Source
from fedlens.data.prepared import CLIENTS, PREPARED
from fedlens.data.published import cifar10, cifar100, fashion_mnist, mnist

__all__ = ["DATASETS", "OWN_CLIENTS", "Source"]

DATASETS: dict[str, Callable[..., Dataset]] = {
    "fashion-mnist-mini": fashion_mnist_mini,
    "fashion-mnist": fashion_mnist,
    "mnist": mnist,
    "cifar10": cifar10,
    "cifar100": cifar100,
    "tiny-imagenet": tiny_imagenet,
    "femnist": femnist,
    "omniglot": omniglot,
    **PREPARED,
    "folder": folder,
    "csv": csv,
    "npz": npz,
}

OWN_CLIENTS = {"femnist": "writer", "omniglot": "drawer", **CLIENTS}
"""The data sets that come with clients of their own, and the column that names them."""
