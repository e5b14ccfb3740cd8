"""The examples of a site: read once, then memory-mapped from a cache file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from zipfile import ZipFile, is_zipfile

import numpy as np
import torch

from fedlens.config.options import did_you_mean
from fedlens.core.federation import Examples
from fedlens.data import numpy_files
from fedlens.data.arrays import Column, Pixels
from fedlens.data.class_names import called
from fedlens.data.csv_files import listed_in
from fedlens.data.folders import listed_by_class
from fedlens.data.pictures import Form, Found, Undecodable, decode, glance, in_parallel, refuse
from fedlens.data.places import Counted
from fedlens.fleet.terms import Terms
from fedlens.storage.kept import kept
from fedlens.storage.reading import reading


def site_examples(data: Path, terms: Terms, cache: Path | None) -> Examples:
    """The examples in `data`, with the class numbers of the terms.

    `data` is a .npz file with x_train and y_train (and classes, if its labels are numbered
    differently), a folder with a folder of images for each class, or a csv file that lists them
    with labels, as `fedlens import` writes it. `cache` keeps what was read;
    without it, nothing is written.
    """
    place = None if cache is None else cache / _fingerprint(data, terms)
    pixels, labels = kept(place, ["images", "labels"], lambda: _read(data, terms))
    return Examples(torch.from_numpy(pixels).permute(0, 3, 1, 2), torch.from_numpy(labels))


def _listed(data: Path) -> Found | None:
    """The image files of a folder, or those to train on of a csv file; None for other data."""
    if data.is_dir():
        return listed_by_class(data)
    return listed_in(data).of("train") if data.suffix == ".csv" else None


def check_files(data: Path, watch: Counted | None = None) -> None:
    """Raise ValueError that names all image files in `data` that cannot be decoded."""
    listed = _listed(data)
    files = [] if listed is None else listed.files

    def broken(file: Path) -> Undecodable | None:
        try:
            glance(file)
        except Undecodable as error:
            return error
        return None

    found = [one for one in in_parallel(broken, files, watch) if one is not None]
    refuse(found, "take them out, or list the others in a csv file, as `fedlens import` does")


def identity(data: Path) -> str:
    """A hash of names, sizes and classes, or of checksums (.npz): the same for a copy of the data.

    No image is opened. Raise ValueError if `data` cannot hold examples.
    """
    if not data.exists():
        raise ValueError(f"{data} does not exist: set --data to the site's examples")
    if (listed := _listed(data)) is not None:
        content: list[list[Any]] = [
            [name, (listed.base / name).stat().st_size, listed.classes[label]]
            for name, label in zip(listed.names, listed.labels, strict=True)
        ]
    elif not is_zipfile(data):
        raise ValueError(
            f"{data} is not a folder, a csv or .npz file: set --data to the site's examples"
        )
    else:
        with reading(data), ZipFile(data) as file:
            content = [[entry.filename, entry.CRC] for entry in file.infolist()]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def num_examples(data: Path) -> int:
    """How many examples are in `data`. No image is opened."""
    if (listed := _listed(data)) is not None:
        return len(listed.files)
    with reading(data), np.load(data, allow_pickle=False) as file:
        return len(file["y_train"])


def write_site(path: Path, held: Examples, classes: Sequence[str]) -> None:
    """Write a site's .npz file, with the examples in the order in which a client holds them."""
    images = held.read(slice(None)).permute(0, 2, 3, 1)
    if images.dtype is not torch.uint8:
        raise ValueError("a site's file holds images of uint8: give the data set as pixels")
    names = np.array(list(classes))
    np.savez(path, x_train=images.numpy(), y_train=held.labels.numpy(), classes=names)


def _read(data: Path, terms: Terms) -> tuple[Pixels, Column]:
    channels, height, width = terms.shape
    if (listed := _listed(data)) is not None:
        size = height if height == width else None
        form = Form(size, channels, terms.content.data.fit)
        pixels, broken = decode(listed.files, (height, width, channels), form)
        refuse(broken)
        classes, own = [*listed.classes], np.asarray(listed.labels)
    else:
        try:
            with data.open("rb") as file:
                arrays = numpy_files.read(file, str(data))
        except OSError as error:
            raise ValueError(f"{data} cannot be read ({error.strerror}): set --data") from error
        part = numpy_files.part(arrays, "train", str(data))
        pixels, own = part.images.permute(0, 2, 3, 1).numpy(), part.labels.numpy()
        classes = [str(name) for name in arrays.get("classes", np.array(terms.classes))]
    classes = [called(name) for name in classes]
    if pixels.shape[1:] != (height, width, channels):
        found = "×".join(map(str, pixels.shape[1:]))
        raise ValueError(f"{data} has images of {found}: {height}×{width}×{channels} are asked for")
    unknown = sorted({classes[label] for label in set(own.tolist())} - set(terms.classes))
    if unknown:
        hint = did_you_mean(unknown[0], terms.classes)
        raise ValueError(
            f"{data} has the class {unknown[0]!r}, which the experiment does not have: {hint}"
        )
    number = {name: i for i, name in enumerate(terms.classes)}
    table = np.array([number.get(name, -1) for name in classes], dtype=np.int64)
    return np.ascontiguousarray(pixels), table[own]


def _fingerprint(data: Path, terms: Terms) -> str:
    """A hash of the files' names, sizes and times, and of the terms' classes and image shape."""
    named = _listed(data)
    files = [*([] if data.is_dir() else [data]), *([] if named is None else named.files)]
    listed = [
        (str(file), stat.st_size, stat.st_mtime_ns)
        for file in files
        if (stat := file.stat() if file.exists() else file.lstat())
    ]
    content = json.dumps([listed, terms.classes, terms.shape, terms.content.data.fit])
    return hashlib.sha256(content.encode()).hexdigest()[:16]
