"""Data sets in one NumPy file."""

from __future__ import annotations

import math
import zipfile
from pathlib import Path
from typing import IO

import numpy as np

from fedlens.config.options import did_you_mean
from fedlens.core.federation import Dataset, Examples
from fedlens.data.arrays import Column, demand_labels, examples, mean_and_std
from fedlens.data.places import Source
from fedlens.storage import free_memory
from fedlens.storage.reading import reading

ARRAY, ARCHIVE = b"\x93NUMPY", b"PK"  # first bytes of a .npy file and of a .npz file
HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}
NEEDED = ("x_train", "y_train", "x_test", "y_test")


def npz(source: Source, *, path: str) -> Dataset:
    """A NumPy file of x_train, y_train, x_test and y_test.

    Images are uint8 [N, H, W] or [N, H, W, channels], labels whole numbers from 0, or rows [N, L]
    of 0 and 1 for several labels an image. Further arrays come in pairs, such as writer_train and
    writer_test, and become columns; `classes`, if there, names the labels.
    """
    file = source.resolve(path)
    arrays = load(file, "set path to a .npz")
    train, test = (part(arrays, name, str(file)) for name in ("train", "test"))
    if train.images.shape[1:] != test.images.shape[1:]:
        raise ValueError(f"{file}: images of x_train and x_test differ in shape: resize one")
    num_classes = 1 + int(max(train.labels.max(), test.labels.max()))
    if train.multi_label:
        num_classes = arrays["y_train"].shape[1]
    names = arrays.get("classes", np.arange(num_classes))
    if names.ndim != 1 or len(names) < num_classes:
        raise ValueError(
            f"{file}: classes must name all {num_classes} labels, got {list(names.shape)}"
        )
    return Dataset(file.stem, train, test, tuple(map(str, names)), *mean_and_std(train.images))


def load(file: Path, remedy: str = "take another copy") -> dict[str, Column]:
    """All arrays of a NumPy file."""
    with reading(file, remedy), file.open("rb") as opened:
        return read(opened, str(file))


def read(file: IO[bytes], name: str) -> dict[str, Column]:
    """All arrays of a NumPy file, which error messages call `name`."""
    with reading(name, "write it with numpy.savez"):
        if file.read(len(ARRAY)) == ARRAY:
            raise ValueError("it holds one array without a name")
        with zipfile.ZipFile(file) as archive:
            members = [member for member in archive.infolist() if member.filename[-4:] == ".npy"]
            sizes = {member.filename[:-4]: member.file_size for member in members}
            free_memory.demand(name, sizes, "write a smaller one")
            return {member.filename[:-4]: _array(archive, member) for member in members}


def _array(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> Column:
    """One array of a NumPy file; a ValueError if its header does not match its size."""
    name = member.filename[:-4]
    with archive.open(member) as file:
        version = np.lib.format.read_magic(file)
        if version not in HEADERS:
            raise ValueError(f"{name} is of version {version[0]}.{version[1]} of NumPy's format")
        shape, _, dtype = HEADERS[version](file)
        held = member.file_size - file.tell()
    if dtype.hasobject:
        raise ValueError(f"{name} holds Python objects, not numbers or text")
    if min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize != held:
        raise ValueError(f"{name} announces {dtype} {list(shape)}, but has {held:,} bytes")
    with archive.open(member) as file:
        array: Column = np.lib.format.read_array(file, allow_pickle=False)
    return array


def part(arrays: dict[str, Column], part: str, name: str) -> Examples:
    """The examples of a part, "train" or "test"; error messages call the file `name`."""
    for needed in (f"x_{part}", f"y_{part}"):
        if needed not in arrays:
            hint = did_you_mean(needed, set(arrays) - set(NEEDED))
            raise ValueError(f"{name} has no array {needed!r}: rename one ({hint})")
    pixels, labels = arrays[f"x_{part}"], arrays[f"y_{part}"]
    if (
        pixels.dtype != np.uint8
        or pixels.ndim not in (3, 4)
        or (pixels.ndim == 4 and pixels.shape[3] not in (1, 3))
        or not pixels.size
    ):
        raise ValueError(
            f"{name}: x_{part} is {pixels.dtype} {list(pixels.shape)}: "
            "expected uint8 [N, H, W] or [N, H, W, 1 or 3]"
        )
    whole = labels.dtype.kind in "iu" and labels.size and labels.min() >= 0
    rows = labels.ndim == 2 and whole and labels.max() < 2
    if not whole or len(labels) != len(pixels) or not (labels.ndim == 1 or rows):
        raise ValueError(
            f"{name}: y_{part} is {labels.dtype} {list(labels.shape)}: expected [{len(pixels)}] "
            "whole numbers from 0, or rows of 0 and 1 for several labels an image"
        )
    demand_labels(labels, f"{name}: y_{part}")
    columns = {
        key.removesuffix(f"_{part}"): column
        for key, column in arrays.items()
        if key.endswith(f"_{part}") and key not in NEEDED
    }
    for key, column in columns.items():
        if column.shape[:1] != (len(pixels),):
            raise ValueError(
                f"{name}: {key}_{part} is {list(column.shape)}: expected [{len(pixels)}]"
            )
    return examples(pixels, labels, columns)
