"""CIFAR-10 and CIFAR-100, from the published Python files (pickles) or binary files."""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedlens.core.federation import Examples
from fedlens.data.arrays import Column, Pixels, examples
from fedlens.storage.reading import BadFile, reading

PIXELS = 3 * 32 * 32


class _Array:
    """Replaces a NumPy array in a pickle: it takes bytes and a shape, and executes no code."""

    def __init__(self, *_: object) -> None:
        self.content: NDArray[np.uint8] = np.empty((0, PIXELS), np.uint8)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, kind, fortran, content = state
        if not isinstance(kind, _Dtype) or fortran or not isinstance(content, bytes):
            raise ValueError("not a plain array of bytes")
        self.content = np.frombuffer(content, np.uint8).reshape(shape)


class _Dtype:
    """Replaces a NumPy dtype in a pickle, which must be uint8."""

    def __init__(self, code: object, *_: object) -> None:
        if code not in (b"u1", "u1"):
            raise ValueError("an array of something else than bytes")

    def __setstate__(self, state: object) -> None:
        pass


class _Unpickler(pickle._Unpickler):
    """Reads dicts, lists, numbers, text and arrays of bytes, and refuses everything else.

    It extends the unpickler written in Python: the one in C allocates as much memory as a file
    claims to need.
    """

    allowed: Mapping[tuple[str, str], type] = {
        ("numpy.core.multiarray", "_reconstruct"): _Array,
        ("numpy", "ndarray"): _Array,
        ("numpy", "dtype"): _Dtype,
    }

    def find_class(self, module: str, name: str) -> type:
        if (module, name) not in self.allowed:
            raise ValueError(f"it asks for {module}.{name}, which no CIFAR file needs")
        return self.allowed[module, name]


def read_pickle(path: Path, names: Sequence[str]) -> tuple[Pixels, list[Column]]:
    """The pixels [N, 32, 32, 3] of one pickled batch, and its lists of labels by name."""
    with reading(path):
        batch = _Unpickler(io.BytesIO(path.read_bytes()), encoding="bytes").load()
        if not isinstance(batch, dict) or not isinstance(batch.get(b"data"), _Array):
            raise BadFile(path, "it holds no array called data")
        planes = batch[b"data"].content.reshape(-1, 3, 32, 32)
        labels = [_numbers(batch.get(name.encode()), name) for name in names]
    return planes.transpose(0, 2, 3, 1), _checked(path, len(planes), labels)


def _numbers(given: object, name: str) -> Column:
    if not isinstance(given, list) or not all(type(number) is int for number in given):
        raise ValueError(f"its {name} are not a list of numbers")
    return np.array(given, np.int64)


def read_binary(path: Path, num_labels: int) -> tuple[Pixels, list[Column]]:
    """The pixels and labels of one binary batch: records of `num_labels` label bytes and pixels."""
    with reading(path):
        content = np.frombuffer(path.read_bytes(), np.uint8)
    record = num_labels + PIXELS
    if len(content) % record:
        raise BadFile(path, f"{len(content)} bytes is not a multiple of {record}")
    records = content.reshape(-1, record)
    planes = records[:, num_labels:].reshape(-1, 3, 32, 32)
    labels = [records[:, i] for i in range(num_labels)]
    return planes.transpose(0, 2, 3, 1), _checked(path, len(planes), labels)


def _checked(path: Path, num_images: int, labels: list[Column]) -> list[Column]:
    if not num_images:
        raise BadFile(path, "no examples")
    for column in labels:
        if column.shape != (num_images,):
            raise BadFile(path, f"{len(column)} labels for {num_images} images")
    return labels


def read_folder(
    folder: Path, *, train: Sequence[str], test: Sequence[str], labels: Sequence[str], binary: bool
) -> tuple[Examples, Examples]:
    """The training and test examples, each read from one or more files.

    The last list of labels gives the classes. If there are two, "coarse_labels" and "fine_labels",
    both are kept, as the columns "coarse" and "fine".
    """

    def part(files: Sequence[str]) -> Examples:
        paths = [folder / name for name in files]
        batches = [
            read_binary(path, len(labels)) if binary else read_pickle(path, labels)
            for path in paths
        ]
        pixels = np.concatenate([pixels for pixels, _ in batches])
        lists = zip(*(lists for _, lists in batches), strict=True)
        columns = dict(zip(labels, map(np.concatenate, lists), strict=True))
        kept = {name.removesuffix("_labels"): column for name, column in columns.items()}
        return examples(pixels, columns[labels[-1]], kept if len(labels) > 1 else {})

    return part(train), part(test)
