"""What the folders above image files mean: sites, classes, parts such as train and test."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Literal, NamedTuple

from fedlens.data.class_names import called
from fedlens.data.pictures import ENDINGS, Part
from fedlens.storage.reading import demand_text

Reading = Literal["class", "site/class", "class/site"]
"""What the folder levels mean, the outermost first; folders of parts are not counted."""

SPELLINGS: Mapping[Part, Sequence[str]] = {
    "train": ("train", "training"),
    "validation": ("val", "valid", "validation", "dev", "eval"),
    "test": ("test", "testing"),
}
PARTS = {name: part for part, names in SPELLINGS.items() for name in names}
ANNOTATIONS = "val_annotations.txt"  # Tiny ImageNet lists the classes of its test images there


class Placed(NamedTuple):
    """An image file, and the class, site and part that its folders give it."""

    file: Path  # relative to the folder that was read
    label: str
    site: str | None
    part: Part | None  # None: the folders do not mark test images


@dataclass(frozen=True)
class Laid:
    """The image files below a folder, and the layout of the folders."""

    layout: Reading
    placed: Sequence[Placed]
    part_level: int | None  # 0: train and test are the outermost folders; 1: inside each site
    remark: str | None  # for the user: how validation images are used

    @property
    def num_levels(self) -> int:
        """The number of folder levels that mean a site, a class or a part."""
        return len(self.layout.split("/")) + (self.part_level is not None)


def part_named(name: str) -> Part | None:
    """The part that has this name, ignoring case, or None."""
    return PARTS.get(name.strip().lower())


def with_tests(parts: Sequence[Part], where: Path) -> tuple[Sequence[Part], str | None]:
    """The final part of each image, and a remark for the user if there are validation images.

    If there are test images, validation images stay apart; if not, they become the test images.
    """
    count = parts.count("validation")
    if not count:
        return parts, None
    if "test" not in parts:
        said = f"{where} has no test images: its {count:,} for validation are tested on"
        return ["test" if part == "validation" else part for part in parts], said
    said = (
        f"{where} has {count:,} images for validation: they are neither trained nor tested on, and "
        'are used where evaluate.on has "validation"'
    )
    return parts, said


def refuse_strangers(labelled: Iterable[tuple[object, str, Part | None]]) -> None:
    """Raise ValueError for a class that train does not have. Images are (name, class, part)."""
    rows = list(labelled)
    known = {label for _, label, part in rows if part in ("train", None)}
    for name, label, part in rows:
        if label not in known:
            raise stranger(name, label, known, part or "test")


def stranger(name: object, label: str, known: Iterable[str], part: Part) -> ValueError:
    near = get_close_matches(label, sorted(known), n=1)
    rest = f"did you mean {near[0]!r}?" if near else f"add it to train, or take it out of {part}"
    return ValueError(f"{name} is of class {label!r}, which train does not have: {rest}")


def files_below(place: Path, _above: frozenset[Path] = frozenset()) -> Iterator[Path]:
    """The files below a folder at any depth, without hidden ones; links are followed.

    A broken link is listed as a file, which cannot be read: its target may be on a disk that is not
    mounted.
    """
    here = place.resolve()
    if here in _above:  # a link back to a parent folder
        return
    for entry in sorted(os.scandir(place), key=lambda entry: entry.name):
        if entry.name.startswith("."):
            continue
        if entry.is_dir():
            yield from files_below(place / entry.name, _above | {here})
        elif entry.is_file() or (entry.is_symlink() and not Path(entry).exists()):
            yield place / entry.name


def is_image(file: Path) -> bool:
    """Whether the file name has the ending of an image format that can be read."""
    return file.suffix.lower() in ENDINGS


def images(place: Path) -> list[Path]:
    """The image files below a folder, at any depth."""
    return [file for file in files_below(place) if is_image(file)]


def folders_of(place: Path) -> list[Path]:
    """The folders in a folder, without hidden ones."""
    found = [e for e in place.iterdir() if e.is_dir() and not e.name.startswith(".")]
    return sorted(found, key=lambda entry: entry.name)


def without_images(place: Path, files: Sequence[Path], num_levels: int) -> list[Path]:
    """The outermost folders of sites, classes and parts that have no image below them."""
    used = {parent for file in files for parent in file.parents}
    found, level = [], folders_of(place)
    for _ in range(num_levels):
        bare = [entry.relative_to(place) for entry in level]
        found += [entry for entry in bare if entry not in used]
        level = [inner for entry in bare if entry in used for inner in folders_of(place / entry)]
    return found


def read_layout(
    place: Path,
    files: Sequence[Path],
    layout: Reading | None,
    option: Callable[[str], str],
    guess: bool,
) -> Laid:
    """Find what the folders above these images mean; `files` are relative to `place`.

    `option` gives the words for error messages that tell the user how to set a layout. If `layout`
    is None and there are two levels of folders, the outer ones are sites if `guess` is true; else
    this raises ValueError.
    """
    demand_text([str(file) for file in files], f"{place}: the file name")
    at, levels = levels_of(place, files)
    for file, names in zip(files, levels, strict=True):
        if not names:
            instead = "put it into one" if at is None else "put it into one, or elsewhere"
            raise ValueError(f"{place / file} is in no folder of a class: {instead}")
    lengths = [*map(len, levels)]
    shallow, deep = min(lengths), max(lengths)
    lost = place / files[lengths.index(shallow)]
    if layout is None and at == 1 and shallow < 2:
        outer = _some(names[0] for names in levels)
        raise ValueError(
            f"{lost} is in no folder of a class: put it into one or, if {outer} are the classes "
            f"themselves, {option('class')}"
        )
    if layout is None and deep > 1 and not guess:
        first = next(names[0] for names in levels if len(names) > 1)
        outer = _some(names[0] for names in levels)
        inner = _some(names[1] for names in levels if len(names) > 1 and names[0] == first)
        raise ValueError(
            f"{place} has folders within folders: if {outer} are sites, which hold the classes "
            f"{inner}, {option('site/class')}; if {outer} are the classes themselves, "
            f"{option('class')}"
        )
    chosen: Reading = layout or ("site/class" if shallow > 1 else "class")
    if chosen != "class" and shallow < 2:
        if deep < 2:
            raise ValueError(f"{place} has one level of folders: leave layout out")
        raise ValueError(f"{lost} is in no class folder of its site: move it into one")
    parts, remark = _parts(place, files, at)
    label, site = {"class": (0, None), "site/class": (1, 0), "class/site": (0, 1)}[chosen]
    placed = [
        Placed(file, called(names[label]), None if site is None else called(names[site]), part)
        for file, names, part in zip(files, levels, parts, strict=True)
    ]
    refuse_strangers((place / one.file, one.label, one.part) for one in placed)
    return Laid(chosen, placed, at, remark)


def levels_of(place: Path, files: Sequence[Path]) -> tuple[int | None, list[tuple[str, ...]]]:
    """The folder level of train and test, or None, and the other folders above each file.

    Level 0 is the outermost; level 1 is inside each of these. Ambiguous names raise ValueError.
    """
    folders = [file.parts[:-1] for file in files]
    inside: dict[str, set[tuple[str, ...]]] = {}
    for names in folders:
        if names:
            inside.setdefault(names[0], set()).add(names[1:])
    outermost = _are_parts(place, set(folders))
    divided = {name: _are_parts(place / name, inside[name]) for name in sorted(inside)}
    both = next((name for name, is_divided in divided.items() if is_divided), None)
    if outermost and both is not None:
        again = _some(names[0] for names in inside[both] if names)
        raise ValueError(
            f"{place / both} has {again} within it, and has the name of a part itself: rename "
            "one of them"
        )
    for name, is_divided in divided.items():
        if both is not None and not is_divided:
            raise ValueError(
                f"{place / both} is divided into train and test, and {place / name} is not: "
                "divide all alike, or none"
            )
    at = 0 if outermost else 1 if both is not None else None
    if at is None:
        for names in folders:
            if any(map(part_named, names[2:])):
                raise ValueError(
                    f"{place.joinpath(*names)} is too deep for a part: put folders such as train "
                    "and test outermost, or right inside those of sites"
                )
        return None, folders
    return at, [(*names[:at], *names[at + 1 :]) for names in folders]


def _are_parts(place: Path, folders: Set[tuple[str, ...]]) -> bool:
    """Whether the outermost of these folders, all in `place`, are parts; a mix is an error."""
    bare = {names[0]: False for names in folders if names}
    bare |= {names[0]: True for names in folders if len(names) == 1}  # has images directly in it
    called = {name: part for name in sorted(bare) if (part := part_named(name))}
    others = sorted(bare.keys() - called.keys())
    if not called:
        return False
    if () in folders or others:
        if () not in folders and all(bare[n] and called[n] == "train" for n in called):
            return False  # a class of trains, beside classes such as cars
        beside = _some(others) if others else "images"
        raise ValueError(
            f"{place} has {_some(called)} beside {beside}, and nobody can tell whether that is a "
            "part or a class: move one of them elsewhere, or give the class another name"
        )
    first: dict[Part, str] = {}
    for name, part in called.items():
        if first.setdefault(part, name) != name:
            raise ValueError(
                f"{place} has {first[part]} and {name}, which both are for {part}: put them "
                "together, or rename one"
            )
    return True


def _parts(
    place: Path, files: Sequence[Path], at: int | None
) -> tuple[Sequence[Part | None], str | None]:
    if at is None:
        return [None] * len(files), None
    named = [PARTS[file.parts[at].strip().lower()] for file in files]
    if "train" not in named:
        there = _some(file.parts[at] for file in files)
        inside = place / files[0].parts[0] if at == 0 else "a folder within"
        raise ValueError(
            f"{place} has {there} and nothing to train on: add a folder train beside, or name "
            f"{inside} itself"
        )
    if set(named) == {"train"}:
        return [None] * len(files), None
    return with_tests(named, place)


def _some(names: Iterable[str]) -> str:
    found = sorted(set(names))
    return ", ".join(found if len(found) < 5 else [*found[:3], "..."])
