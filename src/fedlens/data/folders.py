"""Folders of image files, with one folder for each class."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np

from fedlens.config.sections import Count, Share
from fedlens.core.federation import Dataset, Fit
from fedlens.data.class_names import called
from fedlens.data.layouts import (
    ANNOTATIONS,
    Placed,
    folders_of,
    images,
    levels_of,
    part_named,
    read_layout,
    stranger,
    without_images,
)
from fedlens.data.pictures import MEGAPIXELS, TEST_SHARE, Form, Found, OnError, dataset
from fedlens.data.places import Source, put_in_place
from fedlens.storage.reading import demand_text, reading

Layout = Literal["class", "site/class"]
"""What the folder levels mean, the outermost first."""


def folder(
    source: Source,
    *,
    path: str,
    layout: Layout | None = None,
    size: Count | None = None,
    fit: Fit = "stretch",
    channels: Literal[1, 3] = 3,
    test_share: Share = TEST_SHARE,
    on_error: OnError = "stop",
    megapixels: float = MEGAPIXELS,
) -> Dataset:
    """Images in `path`/class/, or in `path`/train/class/ and `path`/test/class/.

    With `layout` "site/class" they are in `path`/site/class/, or in train and test outside or
    inside the sites, and a column `site` says whose each is; a class that others have may be empty
    at a site. Without a test folder val takes its place; without both a fixed share of each class,
    `test_share`, becomes test. Images are resized to `size` × `size`, as `fit` says; without a size
    all must be as large as the first. Files that cannot be decoded are named, or left out if
    `on_error` is "skip". So are images of more than `megapixels`.
    """
    found = laid_out(source.resolve(path), layout)
    form = Form(size, channels, fit, megapixels)
    return dataset(found, form, test_share, on_error, source.watch)


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
    placed = [*laid.placed]
    has_tests = any(one.part == "test" for one in placed)
    if listed_apart and not has_tests:
        placed += _annotated(place, listed_apart[0])
    clients = "site" if laid.layout == "site/class" else None
    found = _found(place.resolve().name, place, placed, classes, clients, laid.remark)
    if laid.part_level == 0 and not has_tests and not listed_apart:
        # `held_out` divides images by a hash of the name, in which a folder train has no part.
        outer = placed[0].file.parts[0]
        names = [Path(name).relative_to(outer).as_posix() for name in found.names]
        found = replace(found, base=place / outer, names=names)
    return found


def class_layout(place: Path, classes: Sequence[str]) -> Layout | None:
    """The layout in which the class folders have the names of these classes, or None."""
    _, levels = levels_of(place, [file.relative_to(place) for file in images(place)])
    if levels and all(names and called(names[0]) in classes for names in levels):
        return "class"
    inner = levels and all(len(names) > 1 and called(names[1]) in classes for names in levels)
    return "site/class" if inner else None


def listed_by_class(place: Path) -> Found:
    """All images of a folder that has a folder for each class, with the classes with images."""
    placed = _by_class(place)
    if not placed:
        raise ValueError(
            f"{place} has no class folders with images: put each class's images into its own"
        )
    return _found(place.name, place, placed, sorted({one.label for one in placed}))


def tiny_imagenet(
    source: Source, *, size: Count | None = None, on_error: OnError = "stop"
) -> Dataset:
    """Tiny ImageNet: 110,000 colour images, 64×64, 200 classes, in its published folders.

    Its labelled `val` images are the test images. Fewer classes will do: those in `train`.
    """
    place, _ = put_in_place("tiny-imagenet", source)
    wnids = [entry.name for entry in folders_of(place / "train")]
    if not wnids:
        raise ValueError(f"{place / 'train'} has no class folders: unpack the archive again")
    placed = [one._replace(file="train" / one.file) for one in _by_class(place / "train")]
    with_images = {one.label for one in placed}
    for wnid in wnids:
        if wnid not in with_images:
            empty = place / "train" / wnid
            raise ValueError(f"{empty} has no images: add some or remove the folder")
    with reading(place / "words.txt", "unpack the archive again"):
        lines = (place / "words.txt").read_text(encoding="utf-8").splitlines()
    words = dict(line.split("\t", 1) for line in lines if "\t" in line)
    found = _found("tiny-imagenet", place, [*placed, *_annotated(place, "val")], wnids)
    classes = [words.get(wnid, wnid).partition(",")[0] for wnid in wnids]
    found = replace(found, classes=classes)
    return dataset(found, Form(size, 3), on_error=on_error, watch=source.watch)


def tiny_imagenet_contents(place: Path) -> str:
    """A line about a folder of Tiny ImageNet, perhaps a part of the set; no image is opened."""
    num_classes, num_train = len(folders_of(place / "train")), len(images(place / "train"))
    lines = (place / "val" / ANNOTATIONS).read_bytes().splitlines()
    num_test = sum(1 for line in lines if line.strip())
    return f"{num_train:,} + {num_test:,} images, 64×64, {num_classes:,} classes"


def _by_class(place: Path) -> list[Placed]:
    return [
        Placed(file.relative_to(place), entry.name, None, None)
        for entry in folders_of(place)
        for file in images(entry)
    ]


def _annotated(place: Path, part: str) -> list[Placed]:
    """The test images in a folder in `place`, whose file ANNOTATIONS lists them with classes."""
    file = place / part / ANNOTATIONS
    with reading(file, "unpack the archive again"):
        lines = file.read_text(encoding="utf-8").splitlines()
    cells = [line.split("\t") for line in lines if line.strip()]
    if not cells or any(len(row) < 2 for row in cells):
        raise ValueError(f"{file} is damaged: each line names a file and its class")
    return [Placed(Path(part, "images", row[0]), row[1], None, "test") for row in cells]


def _found(
    name: str,
    place: Path,
    placed: Sequence[Placed],
    classes: Sequence[str],
    clients: str | None = None,
    remark: str | None = None,
) -> Found:
    """These files, sorted by class and name; those without a part are to train on."""
    number = {name: i for i, name in enumerate(classes)}
    for one in placed:
        if one.label not in number:
            raise stranger(place / one.file, one.label, classes, "test")
    rows = sorted(
        (number[one.label], one.file.as_posix(), one.part or "train", one.site) for one in placed
    )
    labels, names, parts, sites = zip(*rows, strict=True)
    demand_text(names, f"{place}: the file name")
    columns = {"site": np.array(sites)} if any(sites) else {}
    return Found(name, place, names, labels, classes, parts, columns, clients, remark)
