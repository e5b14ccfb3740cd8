"""Handwriting, where each client is a writer: FEMNIST and Omniglot."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from string import ascii_lowercase, ascii_uppercase, digits
from typing import Any

import numpy as np

from fedlens.config.sections import Share
from fedlens.core.federation import Dataset, Examples
from fedlens.data import numpy_files
from fedlens.data.arrays import Column, demand_labels, examples, held_out, mean_and_std
from fedlens.data.pictures import Form, decode, refuse
from fedlens.data.places import DRAWINGS, LEAF, Counted, Source, put_in_place
from fedlens.storage.reading import demand_fields, demand_text, reading

SIDE = 28
CHARACTERS = tuple(digits + ascii_uppercase + ascii_lowercase)  # in LEAF's order


def femnist(source: Source) -> Dataset:
    """FEMNIST: gray images of handwritten digits and letters, 28×28, 62 classes, by writer.

    From the JSON files that LEAF makes, in train and test, or from one npz file of x_train,
    y_train, writer_train, the same of test, and writers, their names.
    """
    place, form = put_in_place("femnist", source)
    parts = _leaf(place) if form is LEAF else _arrays(_only(place, *form))
    return Dataset("femnist", *parts, CHARACTERS, *mean_and_std(parts[0].images))


def omniglot(source: Source, *, test_share: Share = 0.2) -> Dataset:
    """Omniglot: characters of 50 alphabets, 28×28, ink on black, 1,623 classes, by drawer.

    From the folders images_background and images_evaluation as published, or from one npz file of
    x_bits (numpy.packbits of the pixels), y, alphabet, drawer and alphabet_names. A fixed share of
    each class, `test_share`, becomes test. A drawer drew one alphabet, and so is named by it.
    """
    place, form = put_in_place("omniglot", source)
    drawn = _drawn(place, source.watch) if form is DRAWINGS else _packed(_only(place, *form))
    pixels, labels, alphabet, drawer = drawn
    people = np.array([f"{a}/{d + 1:02d}" for a, d in zip(alphabet, drawer, strict=True)])
    columns = {"drawer": people, "alphabet": alphabet}
    ids = [f"{label}/{person}" for label, person in zip(labels.tolist(), people, strict=True)]
    test = np.array(held_out(ids, labels.tolist(), test_share, None, place))
    train, tests = (examples(pixels, labels, columns, part) for part in (~test, test))
    classes = _characters(labels, alphabet)
    return Dataset("omniglot", train, tests, classes, *mean_and_std(train.images))


Drawings = tuple[Column, Column, Column, Column]
"""Pixels, labels, alphabets and drawers (numbered from 0), N of each."""


def _drawn(place: Path, watch: Counted | None) -> Drawings:
    """Omniglot as published: files ALPHABET/CHARACTER/0709_01.png, where 01 is the drawer."""
    files = [file for name in DRAWINGS for file in sorted((place / name).glob("*/*/*.png"))]
    if not files:
        raise ValueError(f"{place} has no ALPHABET/CHARACTER/*.png: unpack its archives there")
    drawers = []
    for file in files:
        number = file.stem.rpartition("_")[2]
        if not number.isdecimal() or len(number) > 9 or int(number) < 1:
            raise ValueError(f"{file} does not end with the number of its drawer: take it out")
        drawers.append(int(number) - 1)
    characters = {folder: i for i, folder in enumerate(dict.fromkeys(f.parent for f in files))}
    pixels, broken = decode(files, (SIDE, SIDE, 1), Form(SIDE, 1), watch)
    refuse(broken)
    return (
        255 - pixels[..., 0],  # inverted: published as ink on white
        np.array([characters[file.parent] for file in files]),
        np.array([file.parent.parent.name for file in files]),
        np.array(drawers),
    )


def _packed(file: Path) -> Drawings:
    """Omniglot from an npz file."""
    needed = ("x_bits", "y", "alphabet", "drawer", "alphabet_names")
    bits, labels, alphabet, drawer, names = _needed(numpy_files.load(file), needed, file)
    if names.ndim != 1:
        raise ValueError(f"{file}: alphabet_names is {list(names.shape)}: expected a list of names")
    num = len(bits) if bits.ndim else 0
    if bits.dtype != np.uint8 or bits.shape != (num, SIDE * SIDE // 8) or not num:
        raise ValueError(
            f"{file}: x_bits is {bits.dtype} {list(bits.shape)}: expected uint8 [N, 98]"
        )
    for key, column in (("y", labels), ("alphabet", alphabet), ("drawer", drawer)):
        _whole_numbers(column, num, f"{file}: {key}", len(names) if key == "alphabet" else None)
    demand_labels(labels, f"{file}: y")
    pixels = 255 * np.unpackbits(bits, axis=1).reshape(num, SIDE, SIDE)
    return pixels, labels, names[alphabet], drawer


def _characters(labels: Column, alphabets: Column) -> tuple[str, ...]:
    """Class names: the alphabet, and the number of the character within it."""
    alphabet_of = dict(zip(labels.tolist(), alphabets.tolist(), strict=True))
    seen: dict[str, int] = {}
    classes = []
    for label in range(int(labels.max()) + 1):
        alphabet = alphabet_of.get(label, "unused")
        seen[alphabet] = seen.get(alphabet, 0) + 1
        classes.append(f"{alphabet} {seen[alphabet]}")
    return tuple(classes)


def _only(place: Path, pattern: str) -> Path:
    files = sorted(place.glob(pattern))
    if len(files) > 1:
        raise ValueError(f"{place} holds {files[0].name} and {files[1].name}: leave one there")
    return files[0]


def _needed(arrays: dict[str, Column], names: Sequence[str], file: Path) -> list[Column]:
    for name in names:
        if name not in arrays or not arrays[name].ndim:
            raise ValueError(f"{file} has no array {name!r}: it needs {', '.join(names)}")
    return [arrays[name] for name in names]


def _whole_numbers(column: Column, length: int, where: str, bound: int | None) -> Column:
    """Return the column; a ValueError unless it has `length` integers from 0 to below `bound`."""
    fits = column.dtype.kind in "iu" and column.shape == (length,) and column.min(initial=0) >= 0
    if not fits or (bound is not None and column.max(initial=0) >= bound):
        top = "" if bound is None else f" to {bound - 1}"
        raise ValueError(f"{where} must be {length} whole numbers from 0{top}: fix the file")
    return column


def _arrays(file: Path) -> tuple[Examples, Examples]:
    """FEMNIST from an npz file, which has the numbers of the writers and their names."""
    arrays = numpy_files.load(file)
    writers, *_ = _needed(arrays, ("writers", "writer_train", "writer_test"), file)
    parts = []
    for name in ("train", "test"):
        part = numpy_files.part(arrays, name, str(file))
        number = _whole_numbers(
            part.columns["writer"], len(part), f"{file}: writer_{name}", len(writers)
        )
        _whole_numbers(part.labels.numpy(), len(part), f"{file}: y_{name}", len(CHARACTERS))
        parts.append(replace(part, columns={"writer": writers[number]}))
    return parts[0], parts[1]


def _leaf(place: Path) -> tuple[Examples, Examples]:
    """FEMNIST from the JSON files that LEAF writes: for each user, images x and labels y."""
    train, test = (_leaf_part(sorted((place / name).glob("*.json"))) for name in ("train", "test"))
    return train, test


def _leaf_part(files: Sequence[Path]) -> Examples:
    pixels, labels, writers = [], [], []
    for file in files:
        for writer, held in _users(file).items():
            where = f"{file}: user {writer}"
            x, y = _floats(held, "x", where), _floats(held, "y", where)
            if (
                y.ndim != 1
                or x.shape != (len(y), SIDE * SIDE)
                or not 0 <= x.min(initial=0) <= x.max(initial=0) <= 1
            ):
                raise ValueError(
                    f"{where}: x is {list(x.shape)} for {y.size} labels: "
                    f"expected an image of {SIDE * SIDE} numbers from 0 to 1 for each"
                )
            whole = np.where(np.isfinite(y) & (y == np.rint(y)), y, -1).astype(np.int64)
            _whole_numbers(whole, len(y), f"{where}: y", len(CHARACTERS))
            pixels.append(np.rint(255 * x).astype(np.uint8).reshape(-1, SIDE, SIDE))
            labels.append(whole)
            writers += [writer] * len(y)
    if not writers:
        raise ValueError(f"{files[0].parent} has no images: make the files again with LEAF")
    columns = {"writer": np.array(writers)}
    return examples(np.concatenate(pixels), np.concatenate(labels), columns)


def _users(file: Path) -> dict[str, dict[str, Any]]:
    remedy = "make it again with LEAF, or take it out"
    with reading(file, remedy):
        content = demand_fields(json.loads(file.read_bytes()), {"user_data": dict}, file, remedy)
        users: dict[str, dict[str, Any]] = content["user_data"]
        for user, held in users.items():
            demand_fields(held, {"x": list, "y": list}, f"{file}: user {user}", remedy)
    demand_text([*users], f"{file}: user")
    return users


def _floats(held: dict[str, Any], key: str, where: str) -> Column:
    with reading(f"{where}: {key}", "make it again with LEAF"):
        values: Column = np.asarray(held[key], dtype=np.float32)
    return values
