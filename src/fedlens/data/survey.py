"""A survey of a folder of images: its sites, classes and sizes, and its broken files."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import NamedTuple

from fedlens.core.federation import Fit
from fedlens.data.layouts import (
    ANNOTATIONS,
    Laid,
    Placed,
    Reading,
    files_below,
    is_image,
    read_layout,
    refuse_strangers,
    without_images,
)
from fedlens.data.pictures import MEGAPIXELS, Part, glance, in_parallel
from fedlens.data.places import Counted
from fedlens.storage.words import count_of

SEVERAL = re.compile(r"(.*\d.*)[-_ ](?:\d{1,2}|[a-z]|left|right)")  # as in p17_2 or 0042-left
SIDES = (28, 32, 64, 96, 128, 224)  # sizes that images are resized to, in pixels
SAME_SHAPE = 1.1  # so many times as wide, for their height, are images of one shape
FEW = 0.1  # the share of images that may be of another shape than most


class Seen(NamedTuple):
    """An image that can be decoded."""

    path: Path  # relative to the folder
    label: str
    site: str | None
    split: Part | None
    size: tuple[int, int]  # width, height
    gray: bool
    content: str  # a hash of the file
    patient: str  # "" if it is not known


def kinds_of(suffixes: Counter[str]) -> str:
    """The most frequent file endings, with their counts."""
    said = [f"{suffix or 'without ending'} {n:,}" for suffix, n in suffixes.most_common(5)]
    return ", ".join([*said, *["..."] * (len(suffixes) > len(said))])


@dataclass(frozen=True)
class Survey:
    """What a folder holds."""

    folder: Path
    laid: Laid
    seen: Sequence[Seen]
    broken: Sequence[str]  # a line for each file that cannot be decoded
    suffixes: Counter[str]  # of files without the ending of an image, which are ignored
    bare: Sequence[Path]  # folders of sites, classes and parts that have no images

    @property
    def layout(self) -> Reading:
        return self.laid.layout

    @property
    def classes(self) -> Counter[str]:
        return Counter(one.label for one in self.seen)

    @property
    def sites(self) -> Counter[str]:
        return Counter(one.site for one in self.seen if one.site is not None)

    @property
    def parts(self) -> Counter[Part]:
        """The number of images of each part; images without a part are training images."""
        return Counter(one.split or "train" for one in self.seen)

    @property
    def missing(self) -> list[tuple[str, str]]:
        """Pairs of a site and a class that it has no image of."""
        there = {(one.site, one.label) for one in self.seen}
        return [
            (s, c) for s in sorted(self.sites) for c in sorted(self.classes) if (s, c) not in there
        ]

    @property
    def twins(self) -> list[tuple[Seen, Seen]]:
        """Pairs of files with the same content: one may be in train and the other in test."""
        first: dict[str, Seen] = {}
        pairs = [(first.setdefault(one.content, one), one) for one in self.seen]
        return [(a, b) for a, b in pairs if a is not b]

    @property
    def look_alike(self) -> tuple[Path, Path] | None:
        """Two files whose names look like photos of one patient, if most names do; or None."""
        named: dict[str, list[Path]] = {}
        for one in self.seen:
            if found := SEVERAL.fullmatch(one.path.stem.lower()):
                named.setdefault(found[1], []).append(one.path)
        several = [paths for paths in named.values() if len(paths) > 1]
        if len(named) < 2 or 2 * sum(map(len, several)) < len(self.seen):
            return None
        return several[0][0], several[0][1]

    @property
    def deeper(self) -> Path | None:
        """A folder below the levels of sites, classes and parts, or None."""
        levels = self.laid.num_levels
        folders = (one.path.parent for one in self.seen)
        return next((place for place in folders if len(place.parts) > levels), None)

    @property
    def side(self) -> int | None:
        """The side to resize images to, or None if all have the same square size."""
        sizes = {one.size for one in self.seen}
        ((width, height), *others) = sizes
        if not others and width == height and width <= SIDES[-1]:
            return None
        typical = median(min(one.size) for one in self.seen)
        return max((side for side in SIDES if side <= typical), default=SIDES[0])

    @property
    def fit(self) -> Fit | None:
        """How to resize images that are not square; None if they are, or are not resized."""
        ratios = sorted(one.size[0] / one.size[1] for one in self.seen)
        middle = median(ratios)
        if self.side is None or 1 / SAME_SHAPE < ratios[0] <= ratios[-1] < SAME_SHAPE:
            return None
        others = [one for one in ratios if not middle / SAME_SHAPE < one < middle * SAME_SHAPE]
        return "letterbox" if len(others) > FEW * len(ratios) else "stretch"

    @property
    def channels(self) -> int:
        return 1 if all(one.gray for one in self.seen) else 3


def survey(
    folder: Path,
    layout: Reading | None = None,
    watch: Counted | None = None,
    megapixels: float = MEGAPIXELS,
    patient: str | None = None,
) -> Survey:
    """Examine every image below a folder. With two levels of folders, the outer ones are sites.

    What the regular expression `patient` captures in a file's name is its patient. Images of more
    than `megapixels` count as broken. `watch` is called with the number of images examined and the
    total.
    """
    if not folder.is_dir():
        kind = folder.suffix.lstrip(".")
        listed = f', or set dataset = {{ name = "{kind}", path = "{folder}" }} in an experiment'
        rest = listed if kind in ("csv", "npz") else ""
        raise ValueError(f"{folder} is not a folder: name one with images{rest}")
    below = [file.relative_to(folder) for file in files_below(folder)]
    files = sorted(file for file in below if is_image(file))
    suffixes = Counter(file.suffix.lower() for file in below if not is_image(file))
    if not files:
        kinds = f" ({kinds_of(suffixes)})" if below else ""
        raise ValueError(
            f"{folder} has no images that we read{kinds}: name the folder that they are in, or "
            "save them as JPEG or PNG"
        )
    if any(file.name == ANNOTATIONS for file in below):
        raise ValueError(
            f"{folder} is laid out as Tiny ImageNet is, whose classes {ANNOTATIONS} lists: "
            'set dataset = "tiny-imagenet" in an experiment, and name the folder with --data'
        )
    laid = read_layout(folder, files, layout, lambda name: f"add --layout {name}", guess=True)

    patients = _patients(files, patient)

    def examined(one: Placed) -> Seen | str:
        file = folder / one.file
        try:
            size, gray = glance(file, megapixels)
        except ValueError as error:
            return str(error)
        content = hashlib.sha256(file.read_bytes()).hexdigest()
        return Seen(*one, size, gray, content, patients.get(one.file, ""))

    every = list(in_parallel(examined, laid.placed, watch))
    seen = [one for one in every if isinstance(one, Seen)]
    if not seen:
        raise ValueError(
            f"none of {count_of(len(files), 'image')} in {folder} can be decoded: {every[0]}"
        )
    refuse_strangers((folder / one.path, one.label, one.split) for one in seen)
    broken = [one for one in every if isinstance(one, str)]
    bare = without_images(folder, files, laid.num_levels)
    found = Survey(folder, laid, seen, broken, suffixes, bare)
    if len(found.classes) == 1:
        raise ValueError(
            f"{folder} has one class, {seen[0].label}, and nothing to tell it from: name a folder "
            "with several, or add --layout"
        )
    return found


def _patients(files: Sequence[Path], pattern: str | None) -> dict[Path, str]:
    """The patient of each file, where the name matches."""
    if pattern is None:
        return {}
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ValueError(f"--patient {pattern!r} is no regular expression: {error}") from error
    if compiled.groups != 1:
        raise ValueError(
            f"--patient {pattern!r} has {compiled.groups} groups: put what names the patient into "
            "one pair of parentheses"
        )
    found = {file: match[1] for file in files if (match := compiled.search(file.name))}
    if not found:
        raise ValueError(f"--patient {pattern!r} matches no file, such as {files[0].name}")
    return found
