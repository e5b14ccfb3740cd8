"""One writer at a time: a folder is locked while a process writes into it.

The lock is the system's own, on a small file in the folder. It ends with the process that holds
it, however that ends, so a killed process keeps nobody out. What is in the file is for people.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import platform
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

LOCK = ".lock"
BUSY = (errno.EWOULDBLOCK, errno.EACCES)
TRIES, PAUSE = 4, 0.05  # a look at a lock holds it for a moment: another try, seconds later


class FolderLock:
    """A folder that this process alone writes into, until it lets go of it."""

    def __init__(self, folder: Path) -> None:
        """Take it, or raise a ValueError that says who has it."""
        self.folder = folder
        self._handle = _taken(folder)
        about = {
            "pid": os.getpid(),
            "host": platform.node(),
            "since": datetime.now(UTC).isoformat(sep=" ", timespec="seconds"),
        }
        try:
            os.ftruncate(self._handle, 0)
            os.pwrite(self._handle, json.dumps(about).encode(), 0)
        except OSError:  # a full disk: it is locked all the same
            pass
        _HELD.append(self)

    def release(self) -> None:
        """Let go of it; a second time, or in a child of the process that took it, nothing."""
        if self not in _HELD:
            return
        _HELD.remove(self)
        if _is_at(self._handle, self.folder / LOCK):  # else the folder has moved: it is another's
            (self.folder / LOCK).unlink(missing_ok=True)
        os.close(self._handle)

    def __enter__(self) -> FolderLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


@contextmanager
def one_writer(*folders: Path) -> Iterator[None]:
    """Lock folders for a while, which are made if need be.

    They are taken in one order, whatever theirs: of two who want the same, one gets them all.
    """
    with ExitStack() as taken:
        for folder in sorted(folders, key=lambda one: one.resolve()):
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                reason = error.strerror or error
                raise ValueError(
                    f"{folder} cannot be written ({reason}): choose another"
                ) from error
            taken.enter_context(FolderLock(folder))
        yield


def remove_dead_lock(folder: Path) -> None:
    """Remove what is left of a lock whose process was killed; others keep theirs."""
    if (folder / LOCK).exists():
        with suppress(ValueError):  # somebody writes there
            FolderLock(folder).release()


_HELD: list[FolderLock] = []


def _leave_to_parent() -> None:
    """A worker has what was open when it was forked, and would keep a lock that it outlives."""
    while _HELD:
        os.close(_HELD.pop()._handle)


os.register_at_fork(after_in_child=_leave_to_parent)


def is_locked(folder: Path) -> bool:
    """Whether a process writes into a folder now."""
    try:
        handle = os.open(folder / LOCK, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return try_lock(handle, shared=True) is False
    finally:
        os.close(handle)


def try_lock(handle: int, shared: bool = False) -> bool | None:
    """Lock a file unless another has it locked; None where the file system has no locks."""
    try:
        fcntl.flock(handle, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError as error:
        return False if error.errno in BUSY else None
    return True


def _taken(folder: Path) -> int:
    tries = 0
    while True:
        try:
            handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            reason = error.strerror or error
            raise ValueError(f"{folder} cannot be written ({reason}): choose another") from error
        if try_lock(handle) is False:
            tries += 1
            about = os.pread(handle, 4096, 0)
            os.close(handle)
            if tries == TRIES:
                raise ValueError(
                    f"{folder} is being written by {_who(about)}: wait until that is done, or "
                    "stop it"
                )
            time.sleep(PAUSE)
            continue
        if _is_at(handle, folder / LOCK):
            return handle
        os.close(handle)  # whoever had it has just let go, and removed it: once more


def _is_at(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


def _who(about: bytes) -> str:
    try:
        told = json.loads(about)
        return f"process {told['pid']} on {told['host']} since {told['since']}"
    except (ValueError, LookupError, TypeError):
        return "another process"
