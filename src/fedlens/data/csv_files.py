"""Image files listed in a csv file, with their labels and other columns."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping, Sequence
from csv import Error, reader
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from fedlens.config.options import did_you_mean, no_column
from fedlens.config.sections import Count, Share
from fedlens.core.federation import PATIENT, Dataset, Fit
from fedlens.core.label_sets import MOST
from fedlens.data.arrays import Column
from fedlens.data.class_names import called, is_number, rank
from fedlens.data.layouts import part_named, refuse_strangers, with_tests
from fedlens.data.pictures import MEGAPIXELS, TEST_SHARE, Form, Found, OnError, Part, dataset
from fedlens.data.places import Source
from fedlens.data.s2 import degrees
from fedlens.storage.reading import csv_table, is_file

NEEDED = ("path", "label")
OPTIONAL = ("client", "lat", "lon", PATIENT, "split")
LONGEST_HEADER = 1_000_000  # characters
RANGES = {"lat": 90, "lon": 180}
logger = logging.getLogger(__name__)

BETWEEN = re.compile("[;|]")  # several labels in one cell


class Row(NamedTuple):
    where: str  # "file:line", the beginning of an error message
    cells: Mapping[str, str]
    labels: Sequence[str]


def csv(
    source: Source,
    *,
    path: str,
    size: Count | None = None,
    fit: Fit = "stretch",
    channels: Literal[1, 3] = 3,
    client: str | None = None,
    multi_label: bool = False,
    test_share: Share = TEST_SHARE,
    on_error: OnError = "stop",
    megapixels: float = MEGAPIXELS,
) -> Dataset:
    """A csv file with the header path,label and, where known, client, patient, lat, lon and split.

    Paths are relative to the csv file. `split` says train, validation or test; without it a
    fixed share of each class, `test_share`, becomes test, about the same of each client, and all
    images of a patient or none. Another column than `client` may name the clients. All other
    columns are kept as text. With `multi_label` an image may have several labels, with ; or |
    between them, or none, and `test_share` is that of all images. Images are resized to `size` ×
    `size`, as `fit` says; without a size all must be as large as the first. Files that cannot be
    decoded are named, or left out if `on_error` is "skip". So are images of more than `megapixels`.
    """
    found = listed_in(source.resolve(path), client, multi_label)
    for joined in [*filter(BETWEEN.search, found.classes)][:1]:
        told = "%s: %r is taken for one class: if these are several labels, set multi_label = true"
        logger.warning(told, found.name, joined)
    form = Form(size, channels, fit, megapixels)
    return dataset(found, form, test_share, on_error, source.watch)


def names_clients(file: Path) -> bool:
    """Whether a csv file has a column `client`; False if the file cannot be read."""
    try:
        with file.open(encoding="utf-8-sig", newline="") as opened:
            header = opened.readline(LONGEST_HEADER)
        return "client" in [cell.strip() for cell in next(reader([header]), [])]
    except (OSError, ValueError, Error):
        return False


def listed_in(file: Path, client: str | None = None, multi_label: bool | None = False) -> Found:
    """The images that a csv file lists. The column `client`, or "client", names the clients.

    If `multi_label` is None, it is unknown: a cell of labels is taken for one, and may be empty.
    """
    rows = _rows(file, multi_label)
    named = [row.labels for row in rows]
    texts = {text for some in named for text in some}
    classes = sorted(texts, key=rank if all(map(is_number, texts)) else None)
    number = {name: i for i, name in enumerate(classes)}
    if not 0 < len(classes) <= MOST and multi_label:
        raise ValueError(f"{file}: the images have {len(classes)} labels: give 1 to {MOST}")
    labels = [
        sum(1 << number[text] for text in {*some}) if multi_label else number[some[0]]
        for some in named
    ]
    columns = _columns(rows)
    if client is not None and client not in columns:
        raise no_column(f"{file}:1: there is", client, columns)
    parts, remark = _parts(file, rows)
    return Found(
        file.stem,
        file.parent,
        [row.cells["path"] for row in rows],
        labels,
        classes,
        parts,
        columns,
        client or ("client" if "client" in columns else None),
        remark,
        multi_label=bool(multi_label),
    )


def _parts(file: Path, rows: Sequence[Row]) -> tuple[Sequence[Part], str | None]:
    """The part of each row, and a remark for the user; without `split` all are to train on."""
    if "split" not in rows[0].cells:
        return ["train"] * len(rows), None
    parts, remark = with_tests([_part(row) for row in rows], file)
    for what in ("train", "test"):
        if what not in parts:
            raise ValueError(f"{file}: no row has split {what}: mark some, or drop the column")
    refuse_strangers(
        (f"{row.where}: {row.cells['path']}", label, part)
        for row, part in zip(rows, parts, strict=True)
        for label in row.labels
    )
    first: dict[str, int] = {}
    for i, row in enumerate(rows):
        who = row.cells.get(PATIENT)
        if who and parts[other := first.setdefault(who, i)] != parts[i]:
            raise ValueError(
                f"{row.where}: patient {who!r} is in {parts[i]}, and in {parts[other]} in "
                f"{rows[other].where}: put all images of a patient into one part"
            )
    return parts, remark


def _rows(file: Path, multi_label: bool | None) -> list[Row]:
    """The rows of the file, each of another image that is there."""
    table = csv_table(file, NEEDED, "set path to a csv file in UTF-8", OPTIONAL, strict=True)
    if len({"lat", "lon"} & table[0][1].keys()) == 1:
        raise ValueError(f"{file}:1: lat and lon come together: add the other, or drop it")
    rows: list[Row] = []
    seen: dict[str, int] = {}
    for line, cells in table:
        where, path = f"{file}:{line}", cells["path"]
        named = {name: called(cell) for name, cell in cells.items()} | {"path": path}
        for name in ("path", "client", *["label"] * (multi_label is False)):
            if not named.get(name, "-"):
                none = ", or set multi_label = true, and it has none" * (name == "label")
                raise ValueError(f"{where}: {name} is empty: fill it in or remove the row{none}")
        if (first := seen.setdefault(os.path.normpath(path), line)) != line:
            raise ValueError(
                f"{where}: {path!r} is listed twice, in line {first} too: remove one of the rows"
            )
        if not is_file(file.parent / path):
            between = ", with / between folders" if "\\" in path else ""
            remedy = f"write paths relative to {file.parent}{between}"
            raise ValueError(f"{where}: there is no file {path!r}: {remedy}")
        labels = [named["label"]]
        if multi_label:
            labels = [*filter(None, map(called, BETWEEN.split(cells["label"])))]
        rows.append(Row(where, named, labels))
    return rows


def _columns(rows: Sequence[Row]) -> dict[str, Column]:
    columns = {}
    for name in rows[0].cells:
        if name in (*NEEDED, "split"):
            continue
        cells: list[Any] = [row.cells[name] for row in rows]
        if name in RANGES:
            cells = [degrees(row.cells[name], RANGES[name], f"{row.where}: {name}") for row in rows]
        columns[name] = np.array(cells)
    return columns


def _part(row: Row) -> Part:
    """The part that a row's `split` names, in any of the usual spellings."""
    split = row.cells["split"]
    part = part_named(split)
    if part is None:
        hint = did_you_mean(split, ("train", "validation", "test"))
        raise ValueError(f"{row.where}: split is {split!r}: {hint}")
    return part
