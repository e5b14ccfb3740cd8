"""Atomic writes: a file exists completely or not at all."""

from __future__ import annotations

import glob
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from fedlens.storage.locks import try_lock
from fedlens.storage.reading import never_ends

PART = ".part"  # the suffix of a file that is still being written


def write_atomically(path: Path, content: bytes) -> None:
    """Write `content` to a file beside `path`, which replaces `path` once it is on the disk."""
    with replacing(path) as file:
        file.write(content)


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a file beside `path` that replaces `path` once it is written and on the disk.

    If that fails, it is removed. Files that killed processes left behind are removed, too. A device
    or a pipe cannot be replaced: it is written to directly.
    """
    if never_ends(path):
        with path.open("wb") as file:
            yield file
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(path.parent, glob.escape(path.name))
        handle, part = _new_part(path)
    except OSError as error:
        raise _naming(error, path) from error
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            try:
                part.replace(path)
            except OSError as error:
                raise _naming(error, path) from error
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def _naming(error: OSError, path: Path) -> OSError:
    """The error with the name of the file that is wanted, in place of the temporary one's."""
    return OSError(error.errno, error.strerror, str(path))


def remove_leftovers(folder: Path, name: str = "*") -> None:
    """Remove unfinished files of killed processes; a live process holds a lock on its file."""
    for part in folder.glob(f".{name}.*{PART}"):
        with suppress(OSError):
            handle = os.open(part, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                if try_lock(handle):
                    part.unlink(missing_ok=True)
            finally:
                os.close(handle)


def _new_part(path: Path) -> tuple[int, Path]:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    while True:
        part = path.parent / f".{path.name}.{secrets.token_hex(4)}{PART}"
        try:
            handle = os.open(part, flags, 0o666)  # less the umask, as any file
        except FileExistsError:
            continue
        if try_lock(handle) is not False and os.fstat(handle).st_nlink:
            return handle, part
        os.close(handle)  # another process removed it as a leftover before it was locked
        part.unlink(missing_ok=True)
