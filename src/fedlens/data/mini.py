"""The data set inside the package: a balanced tenth of Fashion-MNIST, so that runs need no files.

Made by tools/make_mini.py. Fashion-MNIST has the MIT licence, which is in the same folder.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.resources
import io

from fedlens.core.federation import Dataset
from fedlens.data import numpy_files
from fedlens.data.places import Source
from fedlens.data.published import FASHION_MNIST

NAME = "fashion-mnist-mini"
SHA256 = "dbf491042f9bdebd4b2674d2c9e977868b0b456acafd75c06296b5b55988b513"
CONTENTS = "6,000 + 1,000 images, 28×28, 10 classes"


def fashion_mnist_mini(_source: Source) -> Dataset:
    """600 training and 100 test images of each class of Fashion-MNIST, inside the package."""
    return _unpacked()


@functools.cache
def _unpacked() -> Dataset:
    """The data set, cached in the process: unpacking it takes as long as a small run."""
    arrays = numpy_files.read(io.BytesIO(content()), NAME)
    train, test = (numpy_files.part(arrays, part, NAME) for part in ("train", "test"))
    entry = FASHION_MNIST
    return Dataset(NAME, train, test, entry.classes, entry.mean, entry.std)


def content() -> bytes:
    """The bytes of the file, after a check of their hash."""
    file = importlib.resources.files("fedlens.data") / "files" / f"{NAME}.npz"
    content = file.read_bytes()
    if hashlib.sha256(content).hexdigest() != SHA256:
        raise ValueError(f"{file} is damaged: install fedlens again")
    return content
