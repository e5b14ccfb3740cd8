"""The iNaturalist and Landmarks data sets of Hsu et al. (2020).

They are made from the split files that the authors published, or, by the rules of their paper, from
the metadata of iNaturalist 2017 and of the Google Landmarks Dataset v2. Where a rule draws images
at random, hashes of their ids decide, so that the result is the same on every machine.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fedlens.config.names import OWN_CLIENTS
from fedlens.data import s2
from fedlens.data.arrays import Column, demand_labels
from fedlens.data.class_names import is_number, rank
from fedlens.storage.reading import csv_table, reading

GEO = {"30k": 30_000, "3k": 3_000, "1k": 1_000, "100": 100}  # N_max
INATURALIST = ("train2017.json", "train2017_locations.json", "val2017.json")
LANDMARKS = ("train_clean.csv", "train_attribution.csv")


@dataclass(frozen=True)
class Listing:
    """The images of a set, before decoding: first the training images, then the test images."""

    ids: Sequence[str]
    labels: Column  # [N]
    num_train: int
    classes: Sequence[str]
    columns: Mapping[str, Column] = field(default_factory=dict)  # [N]


def listing(name: str, place: Path) -> Listing:
    """The images of the set called `name`, from split files in a folder or else from metadata."""
    if name not in SETS:
        raise ValueError(f"{name!r} is not prepared: choose {', '.join(SETS)}")
    column, (needed, curate) = OWN_CLIENTS[name], SETS[name]
    splits = sorted(place.glob("federated_train*.csv"))
    if len(splits) == 1 and (place / "test.csv").is_file():
        return from_split_files(splits[0], place / "test.csv", column)
    lacking = [file for file in needed if not (place / file).is_file()]
    if lacking:
        raise ValueError(
            f"{place} has neither a federated_train*.csv and a test.csv nor {', '.join(lacking)}: "
            f"put the published split of {name} there, or {', '.join(needed)}"
        )
    with reading(place, "take another copy of its files"):
        return curate(place)


def from_split_files(train: Path, test: Path, column: str) -> Listing:
    """Read the published files: user_id, image_id, class for train; image_id, class for test."""
    rows = [row for row in _table(train, "user_id", "image_id", "class") if row["user_id"] != "NA"]
    tests = _table(test, "image_id", "class")
    ids = [row["image_id"] for row in (*rows, *tests)]
    _refuse_twins(ids, train)
    labels = np.array([_number(row["class"], train) for row in (*rows, *tests)])
    demand_labels(labels, f"{train}: class")
    users = np.array([row["user_id"] for row in rows] + [""] * len(tests))
    classes = [str(label) for label in range(int(labels.max(initial=0)) + 1)]
    return Listing(ids, labels, len(rows), classes, {column: users})


def inaturalist(place: Path, n_max: int | None = None, per_class: int = 100) -> Listing:
    """iNaturalist 2017 balanced: of each class with 100 training images or more, 100 are drawn.

    The test images are those of val2017 in these classes. With `n_max`, only images whose S2 cell
    becomes a client are kept, and the column `cell` names the cell.
    """
    described = _json(place / "train2017.json")
    train = _images_of(described, place / "train2017.json")
    val = _images_of(_json(place / "val2017.json"), place / "val2017.json")
    places = place / "train2017_locations.json"
    where = {str(row["id"]): row for row in _json(places, list) if "id" in row}
    members: dict[str, list[str]] = {}
    for image, (_, category) in train.items():
        if where.get(image, {}).get("user_id") is not None:
            members.setdefault(category, []).append(image)
    kept = sorted((c for c, images in members.items() if len(images) >= per_class), key=rank)
    if not kept:
        raise ValueError(f"{place}: no class has {per_class} images whose user is known: add more")
    ids = [image for category in kept for image in drawn(members[category], per_class)]
    user = np.array([str(where[image]["user_id"]) for image in ids])
    lat, lon = (
        np.array(
            [s2.degrees(where[i].get(key), limit, f"{places}: {key} of image {i}") for i in ids]
        )
        for key, limit in (("lat", 90), ("lon", 180))
    )
    columns = {"user": user, "lat": lat, "lon": lon}
    if n_max is not None:
        tokens, owner = s2.clients(lat, lon, n_max)
        chosen = np.flatnonzero(owner >= 0)
        ids = [ids[i] for i in chosen]
        columns = {name: c[chosen] for name, c in columns.items()}
        columns["cell"] = np.array(tokens, dtype="<U16")[owner[chosen]]
    number = {category: label for label, category in enumerate(kept)}
    tests = [image for image, (_, category) in val.items() if category in number]
    labels = [number[train[i][1]] for i in ids] + [number[val[i][1]] for i in tests]
    files = [Path(train[i][0]).stem for i in ids] + [Path(val[i][0]).stem for i in tests]
    _refuse_twins(files, place / "train2017.json")
    nothing = {name: np.nan if name in ("lat", "lon") else "" for name in columns}
    whole = {
        name: np.concatenate([c, np.full(len(tests), nothing[name], c.dtype)])
        for name, c in columns.items()
    }
    names = {str(row["id"]): str(row["name"]) for row in described["categories"]}
    return Listing(files, np.array(labels), len(ids), [names.get(c, c) for c in kept], whole)


def landmarks(place: Path) -> Listing:
    """The cleaned Google Landmarks Dataset v2, with authors and landmarks that have enough images.

    Every landmark has at least 30 images by at least 10 authors, every author at least 30 images
    of at least 5 landmarks: the rules depend on each other, and are applied until nothing changes.
    The test images are at most 10 per landmark, by other authors.
    """
    author = {
        row["id"]: row["author"] for row in _table(place / "train_attribution.csv", "id", "author")
    }
    pairs = [
        (image, row["landmark_id"])
        for row in _table(place / "train_clean.csv", "landmark_id", "images")
        for image in row["images"].split()
        if author.get(image)
    ]
    if not pairs:
        raise ValueError(f"{place}: no image has an author: check that both files belong together")
    ids = [image for image, _ in pairs]
    _refuse_twins(ids, place / "train_clean.csv")
    names, landmark = np.unique([name for _, name in pairs], return_inverse=True)
    people, who = np.unique([author[image] for image in ids], return_inverse=True)
    train = frequent(landmark, who)
    if not train.any():
        raise ValueError(f"{place}: no landmark and author have enough images: add more")
    others = ~np.isin(who, who[train]) & np.isin(landmark, landmark[train])
    left: dict[int, list[int]] = {}
    for i in np.flatnonzero(others):
        left.setdefault(int(landmark[i]), []).append(int(i))
    position = {image: i for i, image in enumerate(ids)}
    tests = [
        position[image]
        for members in left.values()
        for image in drawn([ids[i] for i in members], 10)
    ]
    order = [*np.flatnonzero(train).tolist(), *tests]
    kept = sorted(set(landmark[train].tolist()), key=lambda number: rank(str(names[number])))
    number = {old: new for new, old in enumerate(kept)}
    labels = np.array([number[int(landmark[i])] for i in order])
    users = people[who[order]]
    classes = [str(names[old]) for old in kept]
    return Listing([ids[i] for i in order], labels, int(train.sum()), classes, {"user": users})


def frequent(
    landmark: Column,
    author: Column,
    *,
    images: int = 30,
    authors: int = 10,
    landmarks: int = 5,
) -> Column:  # [N] bool
    """Which images remain when all rules on landmarks and authors hold at the same time."""
    keep = np.ones(len(landmark), dtype=bool)
    while True:
        pairs = np.unique(np.stack([landmark[keep], author[keep]]), axis=1)
        shown = np.bincount(landmark[keep], minlength=landmark.max() + 1) >= images
        shown &= np.bincount(pairs[0], minlength=len(shown)) >= authors
        active = np.bincount(author[keep], minlength=author.max() + 1) >= images
        active &= np.bincount(pairs[1], minlength=len(active)) >= landmarks
        after = keep & shown[landmark] & active[author]
        if (after == keep).all():
            return keep
        keep = after


def drawn(names: Sequence[str], count: int) -> list[str]:
    """At most `count` of the names, chosen by their hashes."""
    return sorted(names, key=lambda name: hashlib.sha256(name.encode()).digest())[:count]


def _images_of(content: dict[str, Any], file: Path) -> dict[str, tuple[str, str]]:
    """The file name and the category of each image, by image id."""
    try:
        files = {str(row["id"]): str(row["file_name"]) for row in content["images"]}
        return {
            str(row["image_id"]): (files[str(row["image_id"])], str(row["category_id"]))
            for row in content["annotations"]
        }
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"{file} is not an annotation file of iNaturalist (no {error}): take another copy"
        ) from error


def _json(file: Path, kind: type[Any] = dict) -> Any:
    with reading(file):
        content = json.loads(file.read_bytes())
    if not isinstance(content, kind):
        raise ValueError(f"{file} holds no JSON {kind.__name__}: take another copy")
    return content


def _table(file: Path, *needed: str) -> list[dict[str, str]]:
    return [row for _, row in csv_table(file, needed, "take another copy")]


def _refuse_twins(ids: Sequence[str], file: Path) -> None:
    seen: set[str] = set()
    for name in ids:
        if name in seen:
            raise ValueError(f"{file}: the image {name!r} is listed twice: remove one")
        seen.add(name)


def _number(text: str, file: Path) -> int:
    if not is_number(text):
        raise ValueError(f"{file}: class {text!r} is not a whole number: number classes from 0")
    return int(text)


def _geo(n_max: int) -> Callable[[Path], Listing]:
    return lambda place: inaturalist(place, n_max)


SETS: dict[str, tuple[tuple[str, ...], Callable[[Path], Listing]]] = {
    "inaturalist-user-120k": (INATURALIST, inaturalist),
    **{f"inaturalist-geo-{k}": (INATURALIST, _geo(n)) for k, n in GEO.items()},
    "landmarks-user-160k": (LANDMARKS, landmarks),
}
"""For each set: the metadata files it can be made from, and the function that does so."""
