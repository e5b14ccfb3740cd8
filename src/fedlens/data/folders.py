"""Folders of image files, one folder a class."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from fedlens.core import Dataset
from fedlens.data.pictures import ENDINGS, Listed, OnError, dataset
from fedlens.data.places import Source, put_in_place
from fedlens.options import did_you_mean
from fedlens.reading import demand_text, reading

ANNOTATIONS = "val_annotations.txt"  # Tiny ImageNet lists the classes of its test images there


def folder(
    source: Source,
    *,
    path: str,
    size: int | None = None,
    channels: Literal[1, 3] = 3,
    test_share: float = 0.2,
    on_error: OnError = "stop",
) -> Dataset:
    """Images in `path`/class/, or in `path`/train/class/ and `path`/test/class/ (or val).

    Without a test folder a fixed share of each class, `test_share`, becomes test. Images are
    resized to `size` × `size`; without a size all must be as large as the first. Files that cannot
    be decoded are named, or left out if `on_error` is "skip".
    """
    place = source.resolve(path)
    if not place.is_dir():
        raise ValueError(f"{place} is not a folder: set path to the folder of the class folders")
    inner = place / "train" if (place / "train").is_dir() else place
    classes = sorted(entry.name for entry in _folders(inner))
    if not classes:
        raise ValueError(f"{inner} has no class folders: put each class's images into its own")
    listed = _listed(inner, classes)
    tests = [place / name for name in ("test", "val") if (place / name).is_dir()]
    if inner != place and tests:
        train, test = listed, _listed(tests[0], classes)
    else:
        train, test = listed.divided(test_share)
    return dataset(place.name, train, test, classes, size, channels, on_error)


def listed_by_class(place: Path) -> tuple[Listed, list[str]]:
    """All images of a folder with a folder for each class, and these classes."""
    classes = sorted(entry.name for entry in _folders(place))
    if not classes:
        raise ValueError(f"{place} has no class folders: put each class's images into its own")
    return _listed(place, classes), classes


def tiny_imagenet(
    source: Source, *, size: int | None = None, on_error: OnError = "stop"
) -> Dataset:
    """Tiny ImageNet: 110,000 colour images, 64×64, 200 classes, in its published folders.

    Its labelled `val` images are the test images. Fewer classes will do: those in `train`.
    """
    place, _ = put_in_place("tiny-imagenet", source)
    wnids = sorted(entry.name for entry in _folders(place / "train"))
    if not wnids:
        raise ValueError(f"{place / 'train'} has no class folders: unpack the archive again")
    train, test = _listed(place / "train", wnids), _listed(place / "val", wnids)
    with reading(place / "words.txt", "unpack the archive again"):
        lines = (place / "words.txt").read_text(encoding="utf-8").splitlines()
    words = dict(line.split("\t", 1) for line in lines if "\t" in line)
    classes = [words.get(wnid, wnid).partition(",")[0] for wnid in wnids]
    return dataset("tiny-imagenet", train, test, classes, size, 3, on_error)


def _folders(place: Path) -> list[Path]:
    return [e for e in place.iterdir() if e.is_dir() and not e.name.startswith(".")]


def _listed(place: Path, classes: Sequence[str]) -> Listed:
    """The images below each class folder, sorted by class and name."""
    number = {name: i for i, name in enumerate(classes)}
    if (place / ANNOTATIONS).is_file():
        found = _annotated(place)
    else:
        found = [(file, entry.name) for entry in _folders(place) for file in _images(entry)]
        full = {name for _, name in found}
        for entry in _folders(place):
            if entry.name not in full:
                raise ValueError(f"{entry} has no images: add some or remove the folder")
    for file, name in found:
        if name not in number:
            hint = did_you_mean(name, classes)
            raise ValueError(f"{file} is of class {name!r}, which train has not: {hint}")
    if not found:
        raise ValueError(f"{place} has no images: add some or remove the folder")
    rows = sorted((number[name], file.relative_to(place).as_posix()) for file, name in found)
    demand_text([name for _, name in rows], f"{place}: the file name")
    return Listed([name for _, name in rows], [label for label, _ in rows], place)


def _images(place: Path) -> list[Path]:
    files = (file for file in place.rglob("*") if file.suffix.lower() in ENDINGS)
    return [file for file in files if file.is_file() and not file.name.startswith(".")]


def _annotated(place: Path) -> list[tuple[Path, str]]:
    with reading(place / ANNOTATIONS, "unpack the archive again"):
        lines = (place / ANNOTATIONS).read_text(encoding="utf-8").splitlines()
    rows = [line.split("\t") for line in lines if line.strip()]
    if any(len(row) < 2 for row in rows):
        raise ValueError(f"{place / ANNOTATIONS} is damaged: each line names a file and its class")
    return [(place / "images" / row[0], row[1]) for row in rows]
