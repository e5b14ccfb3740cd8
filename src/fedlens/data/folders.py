"""Folders of image files, with one folder for each class."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from fedlens.core.federation import Dataset
from fedlens.data.class_names import called
from fedlens.data.layouts import (
    ANNOTATIONS,
    Laid,
    Part,
    folders_of,
    images,
    levels_of,
    part_named,
    read_layout,
    stranger,
    without_images,
)
from fedlens.data.pictures import MEGAPIXELS, TEST_SHARE, Found, Listed, OnError, dataset
from fedlens.data.places import Source, put_in_place
from fedlens.storage.reading import demand_text, reading

Layout = Literal["class", "site/class"]
"""What the folder levels mean, the outermost first."""


def folder(
    source: Source,
    *,
    path: str,
    layout: Layout | None = None,
    size: int | None = None,
    channels: Literal[1, 3] = 3,
    test_share: float = TEST_SHARE,
    on_error: OnError = "stop",
    megapixels: float = MEGAPIXELS,
) -> Dataset:
    """Images in `path`/class/, or in `path`/train/class/ and `path`/test/class/.

    With `layout` "site/class" they are in `path`/site/class/, or in train and test outside or
    inside the sites, and a column `site` says whose each is; a class that others have may be empty
    at a site. Without a test folder val takes its
    place; without both a fixed share of each class, `test_share`, becomes test. Images are
    resized to `size` × `size`; without a size all must be as large as the first. Files that cannot
    be decoded are named, or left out if `on_error` is "skip". So are images of more than
    `megapixels`.
    """
    found = laid_out(source.resolve(path), layout)
    return dataset(found, size, channels, test_share, on_error, megapixels, source.watch)


def laid_out(place: Path, layout: Layout | None) -> Found:
    """The images below a folder. With two levels of folders, `layout` must be given."""
    if not place.is_dir():
        raise ValueError(f"{place} is not a folder: set path to the folder of the class folders")
    files = [file.relative_to(place) for file in images(place)]
    listed_apart = [
        entry.name
        for entry in folders_of(place)
        if part_named(entry.name) in ("validation", "test") and (entry / ANNOTATIONS).is_file()
    ]
    files = [file for file in files if file.parts[0] not in listed_apart]
    if all(len(file.parts) < 2 for file in files):
        raise ValueError(f"{place} has no class folders: put each class's images into its own")
    laid = read_layout(place, files, layout, lambda name: f'set layout = "{name}"', guess=False)
    classes = sorted({one.label for one in laid.placed if one.part in ("train", None)})
    for entry in without_images(place, files, laid.num_levels):
        beside = laid.part_level == 0 and len(entry.parts) == 1 and not part_named(entry.name)
        # A site often has no images of a class that other sites have: this is not an error.
        is_of_site = laid.layout == "site/class" and len(entry.parts) == laid.num_levels
        elsewhere = is_of_site and called(entry.name) in classes
        if not beside and not elsewhere and entry.name not in listed_apart:
            raise ValueError(f"{place / entry} has no images: add some or remove the folder")
    train, validation, test = (
        _of_part(place, laid, classes, part) for part in ("train", "validation", "test")
    )
    assert train is not None
    if listed_apart and test is None:
        test = _annotated(place / listed_apart[0], classes)
    clients = "site" if laid.layout == "site/class" else None
    name = place.resolve().name
    return Found(name, classes, train, test, clients, validation, laid.remark)


def _of_part(place: Path, laid: Laid, classes: Sequence[str], part: Part) -> Listed | None:
    """The images of a part, sorted by class and name; images without a part are training images."""
    some = [one for one in laid.placed if (one.part or "train") == part]
    if not some:
        return None
    # Names are relative to an outermost part: `held_out` divides images by a hash of the name.
    base = place / some[0].file.parts[0] if laid.part_level == 0 else place
    return _sorted(base, [(place / one.file, one.label, one.site) for one in some], classes)


def class_layout(place: Path, classes: Sequence[str]) -> Layout | None:
    """The layout in which the class folders have the names of these classes, or None."""
    _, levels = levels_of(place, [file.relative_to(place) for file in images(place)])
    if levels and all(names and called(names[0]) in classes for names in levels):
        return "class"
    inner = levels and all(len(names) > 1 and called(names[1]) in classes for names in levels)
    return "site/class" if inner else None


def listed_by_class(place: Path) -> tuple[Listed, list[str]]:
    """All images of a folder that has a folder for each class, and the classes with images."""
    found = [(file, entry.name, None) for entry in folders_of(place) for file in images(entry)]
    if not found:
        raise ValueError(
            f"{place} has no class folders with images: put each class's images into its own"
        )
    classes = sorted({name for _, name, _ in found})
    return _sorted(place, found, classes), classes


def tiny_imagenet(
    source: Source, *, size: int | None = None, on_error: OnError = "stop"
) -> Dataset:
    """Tiny ImageNet: 110,000 colour images, 64×64, 200 classes, in its published folders.

    Its labelled `val` images are the test images. Fewer classes will do: those in `train`.
    """
    place, _ = put_in_place("tiny-imagenet", source)
    wnids = sorted(entry.name for entry in folders_of(place / "train"))
    if not wnids:
        raise ValueError(f"{place / 'train'} has no class folders: unpack the archive again")
    train, with_images = listed_by_class(place / "train")
    for wnid in wnids:
        if wnid not in with_images:
            empty = place / "train" / wnid
            raise ValueError(f"{empty} has no images: add some or remove the folder")
    test = _annotated(place / "val", wnids)
    with reading(place / "words.txt", "unpack the archive again"):
        lines = (place / "words.txt").read_text(encoding="utf-8").splitlines()
    words = dict(line.split("\t", 1) for line in lines if "\t" in line)
    classes = [words.get(wnid, wnid).partition(",")[0] for wnid in wnids]
    found = Found("tiny-imagenet", classes, train, test)
    return dataset(found, size, 3, on_error=on_error, watch=source.watch)


def tiny_imagenet_contents(place: Path) -> str:
    """A line about a folder of Tiny ImageNet, perhaps a part of the set; no image is opened."""
    num_classes, num_train = len(folders_of(place / "train")), len(images(place / "train"))
    lines = (place / "val" / ANNOTATIONS).read_bytes().splitlines()
    num_test = sum(1 for line in lines if line.strip())
    return f"{num_train:,} + {num_test:,} images, 64×64, {num_classes:,} classes"


def _annotated(place: Path, classes: Sequence[str]) -> Listed:
    """The images that the file ANNOTATIONS lists with their classes."""
    with reading(place / ANNOTATIONS, "unpack the archive again"):
        lines = (place / ANNOTATIONS).read_text(encoding="utf-8").splitlines()
    rows = [line.split("\t") for line in lines if line.strip()]
    if not rows or any(len(row) < 2 for row in rows):
        raise ValueError(f"{place / ANNOTATIONS} is damaged: each line names a file and its class")
    return _sorted(place, [(place / "images" / row[0], row[1], None) for row in rows], classes)


def _sorted(
    place: Path, found: Sequence[tuple[Path, str, str | None]], classes: Sequence[str]
) -> Listed:
    """Files with their classes and, if they have any, their sites, sorted by class and name."""
    number = {name: i for i, name in enumerate(classes)}
    for file, name, _ in found:
        if name not in number:
            raise stranger(file, name, classes, "test")
    rows = sorted(
        (number[name], file.relative_to(place).as_posix(), site or "") for file, name, site in found
    )
    labels, names, sites = map(list, zip(*rows, strict=True))
    demand_text(names, f"{place}: the file name")
    return Listed(names, labels, place, {"site": np.array(sites)} if any(sites) else {})
