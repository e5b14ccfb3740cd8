"""Folders of image files, one folder a class."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from fedlens.data.pictures import ENDINGS, TEST_SHARE, Found, Listed, OnError, dataset
from fedlens.data.places import Source, put_in_place
from fedlens.federation import Dataset
from fedlens.options import did_you_mean
from fedlens.reading import demand_text, reading

ANNOTATIONS = "val_annotations.txt"  # Tiny ImageNet lists the classes of its test images there


Layout = Literal["class", "site/class"]
"""What the folders stand for: the outermost first."""


def folder(
    source: Source,
    *,
    path: str,
    layout: Layout | None = None,
    size: int | None = None,
    channels: Literal[1, 3] = 3,
    test_share: float = TEST_SHARE,
    on_error: OnError = "stop",
) -> Dataset:
    """Images in `path`/class/, or in `path`/train/class/ and `path`/test/class/ (or val).

    With `layout` "site/class" they are in `path`/site/class/, and a column `site` says whose each
    is. Without a test folder a fixed share of each class, `test_share`, becomes test. Images are
    resized to `size` × `size`; without a size all must be as large as the first. Files that cannot
    be decoded are named, or left out if `on_error` is "skip".
    """
    found = laid_out(source.resolve(path), layout)
    return dataset(found, size, channels, test_share, on_error, source.watch)


def laid_out(place: Path, layout: Layout | None) -> Found:
    """The images below a folder. Which layout two levels of folders have, somebody must say."""
    if not place.is_dir():
        raise ValueError(f"{place} is not a folder: set path to the folder of the class folders")
    inner = place / "train" if (place / "train").is_dir() else place
    if not _folders(inner):
        raise ValueError(f"{inner} has no class folders: put each class's images into its own")
    if layout is None:
        _refuse_two_levels(inner)
    by_site = layout == "site/class"
    groups = _folders(inner) if by_site else [inner]
    classes = sorted({entry.name for group in groups for entry in _folders(group)})
    train = _listed(inner, classes, by_site)
    tests = [place / name for name in ("test", "val") if (place / name).is_dir()]
    marked = inner != place and tests
    test = _listed(tests[0], classes, by_site) if marked else None
    return Found(place.resolve().name, classes, train, test, "site" if by_site else None)


def class_layout(place: Path, classes: Sequence[str]) -> Layout | None:
    """The layout in which the folders have the names of these classes, if there is one."""
    outer = _folders(place / "test" if (place / "test").is_dir() else place)
    inner = [entry for group in outer for entry in _folders(group)]
    if outer and {entry.name for entry in outer} <= set(classes):
        return "class"
    return "site/class" if inner and {entry.name for entry in inner} <= set(classes) else None


def _refuse_two_levels(place: Path) -> None:
    """Refuse folders in which more folders hold images: they may be sites, or classes."""
    for outer in _folders(place):
        for inner in _folders(outer):
            if images(inner):
                some, inside = _some_names(place), _some_names(outer)
                raise ValueError(
                    f"{place} has folders within folders: if {some} are sites, which hold the "
                    f'classes {inside}, set layout = "site/class"; if {some} are the classes '
                    'themselves, set layout = "class"'
                )


def _some_names(place: Path) -> str:
    names = [entry.name for entry in _folders(place)]
    return ", ".join(names if len(names) < 5 else [*names[:3], "..."])


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
    found = Found("tiny-imagenet", classes, train, test)
    return dataset(found, size, 3, on_error=on_error, watch=source.watch)


def _folders(place: Path) -> list[Path]:
    found = [e for e in place.iterdir() if e.is_dir() and not e.name.startswith(".")]
    return sorted(found, key=lambda entry: entry.name)


def _listed(place: Path, classes: Sequence[str], by_site: bool = False) -> Listed:
    """The images below each class folder, sorted by class and name."""
    number = {name: i for i, name in enumerate(classes)}
    if (place / ANNOTATIONS).is_file():
        found = _annotated(place)
    else:
        groups = _folders(place) if by_site else [place]
        for file in (file for group in groups for file in group.iterdir() if by_site):
            if file.suffix.lower() in ENDINGS:
                raise ValueError(f"{file} is in no class folder of its site: move it into one")
        found = [pair for group in groups for pair in _by_class(group)]
    for file, name in found:
        if name not in number:
            hint = did_you_mean(name, classes)
            raise ValueError(f"{file} is of class {name!r}, which train has not: {hint}")
    if not found:
        raise ValueError(f"{place} has no images: add some or remove the folder")
    rows = sorted((number[name], file.relative_to(place).as_posix()) for file, name in found)
    names = [name for _, name in rows]
    demand_text(names, f"{place}: the file name")
    columns = {"site": np.array([name.partition("/")[0] for name in names])} if by_site else {}
    return Listed(names, [label for label, _ in rows], place, columns)


def _by_class(place: Path) -> list[tuple[Path, str]]:
    """The images below each class folder, and the class of each."""
    found = []
    for entry in _folders(place):
        inside = images(entry)
        if not inside:
            raise ValueError(f"{entry} has no images: add some or remove the folder")
        found += [(file, entry.name) for file in inside]
    if not found:
        raise ValueError(f"{place} has no class folders: put each class's images into its own")
    return found


def images(place: Path) -> list[Path]:
    """The image files below a folder, at any depth."""
    files = (file for file in place.rglob("*") if file.suffix.lower() in ENDINGS)
    return [file for file in files if file.is_file() and not file.name.startswith(".")]


def _annotated(place: Path) -> list[tuple[Path, str]]:
    with reading(place / ANNOTATIONS, "unpack the archive again"):
        lines = (place / ANNOTATIONS).read_text(encoding="utf-8").splitlines()
    rows = [line.split("\t") for line in lines if line.strip()]
    if any(len(row) < 2 for row in rows):
        raise ValueError(f"{place / ANNOTATIONS} is damaged: each line names a file and its class")
    return [(place / "images" / row[0], row[1]) for row in rows]
