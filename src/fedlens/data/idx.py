"""The idx files of MNIST and Fashion-MNIST, plain or gzipped."""

from __future__ import annotations

import gzip
import math
import struct
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedlens.core.federation import Examples
from fedlens.data.arrays import examples
from fedlens.storage import free_memory as memory
from fedlens.storage.reading import MOST_UNPACKED, BadFile, reading

UNSIGNED_BYTE = 0x08


def read(path: Path, ndim: int) -> NDArray[np.uint8]:
    """The array of bytes in an idx file, which must have `ndim` dimensions."""
    is_zipped = path.suffix == ".gz"
    opened = gzip.GzipFile if is_zipped else Path.open
    with reading(path), opened(path, "rb") as file:
        head = file.read(4 + 4 * ndim)
        if len(head) < 4 + 4 * ndim or head[:4] != bytes([0, 0, UNSIGNED_BYTE, ndim]):
            raise BadFile(path, f"not an idx file of bytes in {ndim} dimensions")
        shape = struct.unpack(f">{ndim}I", head[4:])
        size = math.prod(shape)
        most = path.stat().st_size * (MOST_UNPACKED if is_zipped else 1)
        if not size or size > most:
            why = "no examples" if not size else f"{most:,} bytes at the most, shorter than the"
            raise BadFile(path, why if not size else f"{why} {size:,} it announces")
        memory.demand(f"{path}", {"images": size}, "take a machine with more, or fewer images")
        content = file.read(size + 1)
    if len(content) != size:
        said = "longer" if len(content) > size else f"{len(content):,} bytes, shorter"
        raise BadFile(path, f"{said} than the {size:,} it announces")
    return np.frombuffer(content, np.uint8).reshape(shape)


def read_part(folder: Path, part: str, ending: str) -> Examples:
    """The examples of one part, which is "train" or "t10k"."""
    images = folder / f"{part}-images-idx3-ubyte{ending}"
    labels = folder / f"{part}-labels-idx1-ubyte{ending}"
    pixels, numbers = read(images, 3), read(labels, 1)
    if len(pixels) != len(numbers):
        raise BadFile(labels, f"{len(numbers)} labels for {len(pixels)} images")
    return examples(pixels, numbers)


def read_folder(folder: Path, *, ending: str) -> tuple[Examples, Examples]:
    return read_part(folder, "train", ending), read_part(folder, "t10k", ending)
