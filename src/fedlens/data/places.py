"""The folders that are searched for data sets."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from fedlens.storage.reading import expanded

DECODED, FEATURES = "images", "features"  # folders of the cache: what took long to make

Counted = Callable[[int, int], None]
"""A progress callback, called with the number of items done and the total."""


@dataclass(frozen=True)
class Source:
    """Where a run looks for its data. Every function that loads a data set takes one."""

    data: Path | None = None  # the folder named by --data
    base: Path = field(default_factory=Path.cwd)  # what an option `path` is relative to
    watch: Counted | None = None  # called with how many images are decoded, of how many

    def resolve(self, path: str) -> Path:
        """The file or folder that an option `path` refers to."""
        return self.base / expanded(path)


def existing(data: Path | None) -> Path | None:
    """Return the folder given by the user; raise ValueError if it is not a folder."""
    if data is not None and not data.is_dir():
        raise ValueError(f"{data} is not a folder of data sets: name one, or leave it out")
    return data


def cache() -> Path:
    """The user's own folder for data sets, where `fedlens data get` puts them."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else expanded("~") / ".cache") / "fedlens"


def roots(source: Source) -> list[Path]:
    """The folders searched for named data sets, in this order."""
    named = os.environ.get("FEDLENS_DATA")
    places = [source.data, expanded(named) if named else None, cache()]
    return list(dict.fromkeys(place for place in places if place is not None))


def not_here(name: str, source: Source, remedy: str) -> ValueError:
    looked = ", ".join(str(root) for root in roots(source))
    return ValueError(f"{name} is not in {looked}: {remedy}")


Files = tuple[str, ...]
"""Patterns of file names, all in one folder."""


class PlacedByUser(NamedTuple):
    """A data set whose files the user must put into a folder, as Fedlens cannot fetch them."""

    folders: tuple[str, ...]
    forms: tuple[Files, ...]
    contents: str
    origin: str  # how to get its files


LEAF = ("train/*.json", "test/*.json")
DRAWINGS = ("images_background", "images_evaluation")
PLACED = {
    "tiny-imagenet": PlacedByUser(
        folders=("tiny-imagenet-200",),
        forms=(("train", "words.txt", "val/val_annotations.txt"),),
        contents="100,000 + 10,000 images, 64×64, 200 classes",
        origin="unpack http://cs231n.stanford.edu/tiny-imagenet-200.zip",
    ),
    "femnist": PlacedByUser(
        folders=("femnist", "femnist/data"),
        forms=(LEAF, ("femnist*.npz",)),
        contents="characters by writer, 28×28, 62 classes",
        origin="make its files with LEAF (https://github.com/TalwalkarLab/leaf)",
    ),
    "omniglot": PlacedByUser(
        folders=("omniglot",),
        forms=(DRAWINGS, ("omniglot*.npz",)),
        contents="characters by drawer, 28×28, 1,623 classes",
        origin="unpack images_background.zip and images_evaluation.zip of "
        "https://github.com/brendenlake/omniglot",
    ),
}


def put_in_place(name: str, source: Source) -> tuple[Path, Files]:
    """The first folder that holds all files of one of the forms of a set, and that form.

    Under each root, the set's folder names are tried first, then the root itself.
    """
    folders, forms, _, _ = PLACED[name]
    for root in roots(source):
        for folder in (*(root / inner for inner in folders), root):
            for files in forms:
                if folder.is_dir() and all(any(folder.glob(pattern)) for pattern in files):
                    return folder, files
    raise not_here(
        name,
        source,
        f"put {_files(name)} into a folder {folders[0]} there, "
        "or set FEDLENS_DATA to the folder above it",
    )


def to_be_placed(name: str) -> str:
    """Instructions for getting a set that Fedlens cannot fetch."""
    placed = PLACED[name]
    return (
        f"{placed.origin}, and put {_files(name)} into a folder {placed.folders[0]} in {cache()} "
        "or in the folder that FEDLENS_DATA names"
    )


def _files(name: str) -> str:
    forms = ", or ".join(" and ".join(files) for files in PLACED[name].forms)
    return f"its files ({forms})"
