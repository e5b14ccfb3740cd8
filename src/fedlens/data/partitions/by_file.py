"""Published partitions, read from a csv file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from fedlens.core.federation import Examples, Holdings
from fedlens.data.partitions.dealing import NOBODY, holdings
from fedlens.storage.reading import csv_lines, expanded, printable, shortened

HEADER = ("user_id", "image_id", "class")


def published(
    examples: Examples,
    num_classes: int,
    num_clients: int | None,
    rng: np.random.Generator,
    *,
    path: str,
) -> Holdings:
    """The clients of a published split: a csv file, gzipped or not, of user_id, image_id, class.

    An image is named by its position among the training examples in their published order, or,
    where these have a column image_id, by that. Its class must be that of the example. Examples
    that the file does not name are at no client.
    """
    file = expanded(path)
    rows = _rows(file)
    position = _positions(examples)
    labels = examples.labels.tolist()
    users = sorted({user for _, user, _, _ in rows}, key=_rank)
    client = {user: number for number, user in enumerate(users)}
    owner = np.full(len(examples), NOBODY)
    for line, user, image, label in rows:
        place = position.get(image)
        if place is None:
            raise ValueError(
                f"{file}:{line}: there is no image {image!r} among the {len(examples)} training "
                "examples: use the data set that the file divides, whole"
            )
        if str(labels[place]) != label:
            raise ValueError(
                f"{file}:{line}: image {image!r} is of class {label}, but the data say "
                f"{labels[place]}: use the data set that the file divides, whole, and a release "
                "of the file whose image ids are right"
            )
        if owner[place] != NOBODY:
            raise ValueError(
                f"{file}:{line}: image {image!r} stands in the file twice: remove one row"
            )
        owner[place] = client[user]
    return replace(holdings(owner, len(users)), names=tuple(users))


def _rows(file: Path) -> list[tuple[int, str, str, str]]:
    """The line number, user, image and class of each row."""
    lines = csv_lines(file, "set path to a csv or csv.gz")
    header = lines[0][1] if lines else []
    for name in HEADER:
        if name not in header:
            said = shortened(printable(",".join(header))) or "nothing"
            raise ValueError(f"{file}:1: no column {name!r} in {said}: it needs {','.join(HEADER)}")
    columns = [header.index(name) for name in HEADER]
    rows = []
    for line, cells in lines[1:]:
        if len(cells) != len(header):
            raise ValueError(
                f"{file}:{line}: {len(cells)} cells under {len(header)} columns: fix it"
            )
        user, image, label = (cells[column] for column in columns)
        rows.append((line, user, image, label))
    if not rows:
        raise ValueError(f"{file} has no rows: add one for each image")
    return rows


def _positions(examples: Examples) -> dict[str, int]:
    """The position of each image among the examples, by image name."""
    named = examples.columns.get("image_id")
    names = range(len(examples)) if named is None else named.tolist()
    return {str(name): place for place, name in enumerate(names)}


def _rank(user: str) -> tuple[int, str]:
    """A sort key: numbers first, in numeric order, then names in alphabetical order."""
    return (int(user), "") if user.isdecimal() and len(user) < 19 else (2**63, user)
