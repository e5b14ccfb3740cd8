"""Arrays that take long to make: kept for the next time, in a folder that stays below a size."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from fedlens.storage.files import replacing

Array = np.ndarray[Any, Any]

MOST = 20 * 10**9  # bytes that a folder has at most; what was not used for longest goes first
SMALL = 2**20  # bytes of a file that is read; a larger one is mapped, copy-on-write
OWNER_ONLY = 0o700


def kept(
    place: Path | None, names: Sequence[str], make: Callable[[], Sequence[Array]]
) -> Sequence[Array]:
    """Arrays from the folder `place`, or if they are not there, made and written there.

    The name of `place` must depend on all that they are made of. Files are written whole or not at
    all, and a folder that lacks one is made again.
    """
    if place is None:
        return make()
    files = [place / f"{name}.npy" for name in names]
    with suppress(OSError, ValueError, EOFError):  # they are not there, or damaged
        found = [_loaded(file) for file in files]
        with suppress(OSError):
            os.utime(place)
        return found
    made = make()
    with suppress(OSError):  # a cache that cannot be written only costs time
        needed = sum(one.nbytes for one in made)
        place.parent.mkdir(parents=True, exist_ok=True)
        if needed < min(MOST, shutil.disk_usage(place.parent).free / 2):
            place.mkdir(OWNER_ONLY, exist_ok=True)
            for file, one in zip(files, made, strict=True):
                with replacing(file) as opened:
                    np.save(opened, one, allow_pickle=False)
            _bound(place.parent)
    return made


def _loaded(file: Path) -> Array:
    is_small = file.stat().st_size < SMALL
    found: Array = np.load(file, None if is_small else "c", allow_pickle=False)
    return found


def _bound(folder: Path) -> None:
    """Remove what was not used for longest, while there is too much."""
    entries = sorted(folder.iterdir(), key=lambda entry: entry.stat().st_mtime)
    too_much = sum(map(size_of, entries)) - MOST
    for entry in entries[:-1]:
        if too_much > 0:
            too_much -= size_of(entry)
            shutil.rmtree(entry, ignore_errors=True)


def size_of(folder: Path) -> int:
    """The bytes of the files in a folder."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
