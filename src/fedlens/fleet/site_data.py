"""The examples of a site: read once, then memory-mapped from a cache file."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from zipfile import ZipFile, is_zipfile

import numpy as np
import torch

from fedlens.config.options import check
from fedlens.core.federation import Examples
from fedlens.data import numpy_files
from fedlens.data.arrays import Column, Pixels, renumbered
from fedlens.data.class_names import called
from fedlens.data.csv_files import listed_in
from fedlens.data.folders import listed_by_class
from fedlens.data.pictures import (
    Form,
    Found,
    OnError,
    Undecodable,
    decode,
    glance,
    in_parallel,
    refuse,
)
from fedlens.data.places import Counted
from fedlens.fleet.terms import Terms
from fedlens.storage.files import write_atomically
from fedlens.storage.kept import kept
from fedlens.storage.reading import printable, reading

CHECKED = "data.json"  # in the folder of a site: what its files were when it joined


@dataclass(frozen=True)
class Checked:
    """What the image files of a site were when they were checked, before anything is approved."""

    data: str  # their identity
    classes: Mapping[str, int]  # how many images of each
    left_out: Mapping[str, str]  # files that cannot be decoded, and why not

    @classmethod
    def read(cls, home: Path) -> Checked | None:
        """What was found at the site; None if its data are no image files."""
        path = home / CHECKED
        return check(json.loads(path.read_bytes()), cls, str(path)) if path.is_file() else None

    def describe(self, data: str) -> str:
        """What is to be approved, if the examples have the identity `data`."""
        if data != self.data:
            return "not those that were checked: join again, and they are"
        classes = ", ".join(f"{name} {count:,}" for name, count in self.classes.items())
        said = f"{sum(self.classes.values()):,} images here: {classes}"
        if self.left_out:
            (name, why), *more = self.left_out.items()
            others = f" and {len(more):,} more, which are in {CHECKED}" if more else ""
            said += f"; left out, as they cannot be decoded: {name} ({why}){others}"
        return printable(said)


def site_examples(
    data: Path, terms: Terms, cache: Path | None, without: Collection[str] = ()
) -> Examples:
    """The examples in `data`, with the class numbers of the terms.

    `data` is a .npz file with x_train and y_train (and classes, if its labels are numbered
    differently), a folder with a folder of images for each class, or a csv file that lists them
    with labels, as `fedlens import` writes it, `without` some of the files. `cache` keeps what
    was read; without it, nothing is written.
    """
    place = None if cache is None else cache / _fingerprint(data, terms, without)
    pixels, labels = kept(place, ["images", "labels"], lambda: _read(data, terms, without))
    images, several = torch.from_numpy(pixels).permute(0, 3, 1, 2), terms.content.data.multi_label
    return Examples(images, torch.from_numpy(labels), multi_label=several)


def _listed(
    data: Path, without: Collection[str] = (), multi_label: bool | None = None
) -> Found | None:
    """The image files of a folder, or those to train on of a csv file; None for other data."""
    if not data.is_dir() and data.suffix != ".csv":
        return None
    listed = listed_by_class(data) if data.is_dir() else listed_in(data, None, multi_label)
    found = listed.of("train")
    return found.take([i for i, name in enumerate(found.names) if name not in without])


def check_files(
    data: Path, home: Path, on_error: OnError = "stop", watch: Counted | None = None
) -> None:
    """Write down in `home` what the image files in `data` are, and which cannot be decoded.

    Raise ValueError that names these, unless they are to be left out.
    """
    if (listed := _listed(data)) is None:
        (home / CHECKED).unlink(missing_ok=True)
        return

    def broken(file: Path) -> Undecodable | None:
        try:
            glance(file)
        except Undecodable as error:
            return error
        return None

    found = list(in_parallel(broken, listed.files, watch))
    if on_error == "stop":
        refuse([one for one in found if one is not None], "take them out, or add --on-error skip")
    named = zip(listed.names, listed.labels, found, strict=True)
    left_out = {name: one.why for name, _, one in named if one is not None}
    counts = Counter(
        called(listed.classes[label])
        for label, one in zip(listed.labels, found, strict=True)
        if one is None
    )
    if not counts:
        refuse([one for one in found if one is not None])
    checked = Checked(identity(data, left_out), dict(sorted(counts.items())), left_out)
    write_atomically(home / CHECKED, json.dumps(asdict(checked), indent=1).encode())


def identity(data: Path, without: Collection[str] = ()) -> str:
    """A hash of names, sizes and classes, or of checksums (.npz): the same for a copy of the data.

    No image is opened. Raise ValueError if `data` cannot hold examples.
    """
    if not data.exists():
        raise ValueError(f"{data} does not exist: set --data to the site's examples")
    if (listed := _listed(data, without)) is not None:
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


def num_examples(data: Path, without: Collection[str] = ()) -> int:
    """How many examples are in `data`. No image is opened."""
    if (listed := _listed(data, without)) is not None:
        return len(listed.files)
    with reading(data), np.load(data, allow_pickle=False) as file:
        return len(file["y_train"])


def write_site(path: Path, held: Examples, classes: Sequence[str]) -> None:
    """Write a site's .npz file, with the examples in the order in which a client holds them."""
    images = held.read(slice(None)).permute(0, 2, 3, 1)
    if images.dtype is not torch.uint8:
        raise ValueError("a site's file holds images of uint8: give the data set as pixels")
    names, labels = np.array(list(classes)), held.wanted(slice(None), len(classes))
    np.savez(path, x_train=images.numpy(), y_train=labels.numpy(), classes=names)


def _read(data: Path, terms: Terms, without: Collection[str]) -> tuple[Pixels, Column]:
    channels, height, width = terms.shape
    several = terms.content.data.multi_label
    if (listed := _listed(data, without, several)) is not None:
        size = height if height == width else None
        form = Form(size, channels, terms.content.data.fit)
        pixels, broken = decode(listed.files, (height, width, channels), form)
        refuse(broken)
        classes, own, sets = [*listed.classes], np.asarray(listed.labels), listed.multi_label
    else:
        try:
            with data.open("rb") as file:
                arrays = numpy_files.read(file, str(data))
        except OSError as error:
            raise ValueError(f"{data} cannot be read ({error.strerror}): set --data") from error
        part = numpy_files.part(arrays, "train", str(data))
        pixels, own = part.images.permute(0, 2, 3, 1).numpy(), part.labels.numpy()
        sets = part.multi_label
        classes = [str(name) for name in arrays.get("classes", np.array(terms.classes))]
    classes = [called(name) for name in classes]
    if pixels.shape[1:] != (height, width, channels):
        found = "×".join(map(str, pixels.shape[1:]))
        raise ValueError(f"{data} has images of {found}: {height}×{width}×{channels} are asked for")
    if sets is not several:
        kind = "may have several labels: list them in a csv file" if several else "has one class"
        raise ValueError(f"{data}: an image of the experiment {kind}")
    most = int(own.max())
    if (most.bit_length() if several else most + 1) > len(classes):
        raise ValueError(f"{data} has more labels than {len(classes)} classes: name all of them")
    of = data, "the experiment"
    numbers = renumbered(torch.from_numpy(own), classes, terms.classes, several, of)
    return np.ascontiguousarray(pixels), numbers.numpy()


def _fingerprint(data: Path, terms: Terms, without: Collection[str]) -> str:
    """A hash of the files' names, sizes and times, and of the terms' classes and image shape."""
    named = _listed(data, without)
    files = [*([] if data.is_dir() else [data]), *([] if named is None else named.files)]
    listed = [
        (str(file), stat.st_size, stat.st_mtime_ns)
        for file in files
        if (stat := file.stat() if file.exists() else file.lstat())
    ]
    about = terms.content.data
    content = json.dumps([listed, terms.classes, terms.shape, about.fit, about.multi_label])
    return hashlib.sha256(content.encode()).hexdigest()[:16]
