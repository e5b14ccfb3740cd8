"""A look at a folder of images: its sites, classes and sizes, and what is broken."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Literal, NamedTuple

from fedlens.data.folders import images
from fedlens.data.pictures import glance
from fedlens.data.places import Counted
from fedlens.reading import demand_text

Reading = Literal["class", "site/class", "class/site"]
SIDES = (28, 32, 64, 96, 128, 224)  # that images of several sizes are resized to
SPLITS = {"train": "train", "test": "test", "val": "test"}


class Seen(NamedTuple):
    """An image that can be decoded."""

    path: Path  # relative to the folder
    label: str
    site: str | None
    split: str | None
    size: tuple[int, int]  # width, height
    gray: bool
    content: str  # a hash of the file


@dataclass(frozen=True)
class Survey:
    """What there is in a folder."""

    folder: Path
    layout: Reading
    seen: Sequence[Seen]
    broken: Sequence[str]  # a line for each file that cannot be decoded

    @property
    def classes(self) -> Counter[str]:
        return Counter(one.label for one in self.seen)

    @property
    def sites(self) -> Counter[str]:
        return Counter(one.site for one in self.seen if one.site is not None)

    @property
    def missing(self) -> list[tuple[str, str]]:
        """The classes that a site has not."""
        there = {(one.site, one.label) for one in self.seen}
        return [
            (s, c) for s in sorted(self.sites) for c in sorted(self.classes) if (s, c) not in there
        ]

    @property
    def twins(self) -> list[tuple[Seen, Seen]]:
        """Files with the same content: one may be trained on, and the other tested."""
        first: dict[str, Seen] = {}
        pairs = [(first.setdefault(one.content, one), one) for one in self.seen]
        return [(a, b) for a, b in pairs if a is not b]

    @property
    def deeper(self) -> Path | None:
        """A folder below those that are sites and classes, if there is one."""
        levels = len(self.layout.split("/")) + (self.seen[0].split is not None)
        folders = (one.path.parent for one in self.seen)
        return next((place for place in folders if len(place.parts) > levels), None)

    @property
    def side(self) -> int | None:
        """What images are to be resized to, unless all are of one square size."""
        sizes = {one.size for one in self.seen}
        ((width, height), *others) = sizes
        if not others and width == height and width <= SIDES[-1]:
            return None
        typical = median(min(one.size) for one in self.seen)
        return max((side for side in SIDES if side <= typical), default=SIDES[0])

    @property
    def channels(self) -> int:
        return 1 if all(one.gray for one in self.seen) else 3


def survey(folder: Path, layout: Reading | None = None, watch: Counted | None = None) -> Survey:
    """Look at every image below a folder. Of two levels of folders, the outer are sites.

    `watch` is told how many were looked at, of how many.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder: name one with images")
    files = sorted(file.relative_to(folder) for file in images(folder))
    if not files:
        raise ValueError(f"{folder} has no images: name the folder that they are in")
    demand_text([str(file) for file in files], f"{folder}: the file name")
    split = set(SPLITS) & {file.parts[0] for file in files}
    marked = len(split) > 1 and split == {file.parts[0] for file in files}
    levels = [file.parts[1 if marked else 0 : -1] for file in files]
    depth = min(map(len, levels))
    if depth < 1:
        bare = files[levels.index(())]
        raise ValueError(f"{folder / bare} is in no folder of a class: put it into one")
    chosen = layout or ("site/class" if depth > 1 else "class")
    if chosen != "class" and depth < 2:
        raise ValueError(f"{folder} has one level of folders: leave --layout out")

    def look(i: int) -> Seen | str:
        try:
            size, colours = glance(folder / files[i])
        except ValueError as error:
            return str(error)
        outer, inner = (levels[i][0], levels[i][1] if depth > 1 else "")
        label = inner if chosen == "site/class" else outer
        site = {"class": None, "site/class": outer, "class/site": inner}[chosen]
        return Seen(
            files[i],
            label,
            site,
            SPLITS[files[i].parts[0]] if marked else None,
            size,
            all((colours[..., 0] == colours[..., i]).all() for i in (1, 2)),
            hashlib.sha256((folder / files[i]).read_bytes()).hexdigest(),
        )

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        looked = []
        for one in pool.map(look, range(len(files))):
            looked.append(one)
            if watch is not None:
                watch(len(looked), len(files))
    seen = [one for one in looked if isinstance(one, Seen)]
    if not seen:
        raise ValueError(f"none of the {len(files)} images in {folder} can be decoded: {looked[0]}")
    found = Survey(folder, chosen, seen, [one for one in looked if isinstance(one, str)])
    if len(found.classes) == 1:
        raise ValueError(
            f"{folder} has one class, {seen[0].label}, and nothing to tell it from: name a folder "
            "with several, or add --layout"
        )
    return found
