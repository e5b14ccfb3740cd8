"""Partitions that find their clients in the data or in a published file, and so their number."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fedlens.config.options import did_you_mean
from fedlens.config.sections import Count
from fedlens.core.federation import Examples, Holdings, Pool
from fedlens.data import s2 as cells
from fedlens.data.class_names import rank
from fedlens.data.partitions.dealing import NOBODY, Array, holdings
from fedlens.storage.reading import csv_table, expanded

HEADER = ("user_id", "image_id", "class")  # of a published file


def natural(pool: Pool, *, column: str | None = None) -> Holdings:
    """A client for each value of a column: the writer, the user, the camera."""
    if column is None:
        known = ", ".join(sorted(pool.examples.columns))
        remedy = (
            f"set column to one of {known}" if known else "the data have none, so choose another"
        )
        raise ValueError(f"partition 'natural' needs the column that names clients: {remedy}")
    values, owner = np.unique(column_of(pool.examples, column), return_inverse=True)
    names = tuple(map(str, values.tolist()))
    return replace(holdings(owner, len(values)), names=names)


def s2(pool: Pool, *, n_max: Count, lat: str = "lat", lon: str = "lon") -> Holdings:
    """A client for each S2 cell, cut in four until none holds more than `n_max` (Hsu et al.).

    Cells with fewer than 0.01 `n_max` examples are left out, and so are examples without a place
    (not a number). A client is named by the token of its cell.
    """
    places = _degrees(pool.examples, lat, 90), _degrees(pool.examples, lon, 180)
    names, owner = cells.clients(*places, n_max)
    return replace(holdings(owner, len(names)), names=tuple(names))


def _degrees(examples: Examples, name: str, limit: int) -> Array:  # [N] float64
    where = f"a value in the column {name!r}"
    values = column_of(examples, name).tolist()
    return np.array([cells.degrees(value, limit, where) for value in values])


def column_of(examples: Examples, name: str) -> Array:  # [N]
    """The column called `name`, which must have one value for each example."""
    if name not in examples.columns:
        known = sorted(examples.columns)
        hint = did_you_mean(name, known) if known else "choose another partition"
        raise ValueError(f"the data have no column {name!r}: {hint}")
    column = examples.columns[name]
    if column.shape != (len(examples),):
        raise ValueError(
            f"the column {name!r} is {list(column.shape)}: "
            f"it must have one value for each of the {len(examples)} examples"
        )
    return column


def published(pool: Pool, *, path: str) -> Holdings:
    """The clients of a published split: a csv file, gzipped or not, of user_id, image_id, class.

    An image is named by its position among the training examples in their published order, or,
    where these have a column image_id, by that. Its class must be that of the example. Examples
    that the file does not name are at no client.
    """
    file, examples = expanded(path), pool.examples
    rows = csv_table(file, HEADER, "set path to a csv or csv.gz")
    position = _positions(examples)
    labels = examples.labels.tolist()
    users = sorted({row["user_id"] for _, row in rows}, key=rank)
    client = {user: number for number, user in enumerate(users)}
    owner = np.full(len(examples), NOBODY)
    for line, row in rows:
        user, image, label = (row[name] for name in HEADER)
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
            raise ValueError(f"{file}:{line}: image {image!r} is listed twice: remove one row")
        owner[place] = client[user]
    return replace(holdings(owner, len(users)), names=tuple(users))


def _positions(examples: Examples) -> dict[str, int]:
    """The position of each image among the examples, by image name."""
    named = examples.columns.get("image_id")
    names = range(len(examples)) if named is None else named.tolist()
    return {str(name): place for place, name in enumerate(names)}
