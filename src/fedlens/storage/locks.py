"""One writer at a time: a folder is locked while a process writes into it.

The lock is an `flock` of the operating system on a small file in the folder. It ends with the
process that holds it, even if that is killed. Error messages quote what the file says about it.
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
TRIES, PAUSE = 4, 0.05  # `is_locked` holds a lock for a moment: try again after PAUSE seconds


class FolderLock:
    """The lock of a folder: only this process writes into it, until `release`."""

    def __init__(self, folder: Path) -> None:
        """Take the lock, or raise a ValueError that names the process that has it."""
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
        except OSError:  # a full disk: the folder is locked all the same
            pass
        _HELD.append(self)

    def release(self) -> None:
        """Release the lock; does nothing if it is released already, or in a child process."""
        if self not in _HELD:
            return
        _HELD.remove(self)
        # If the folder was moved, the file at this path is the lock of another folder.
        if _is_at(self._handle, self.folder / LOCK):
            (self.folder / LOCK).unlink(missing_ok=True)
        os.close(self._handle)

    def __enter__(self) -> FolderLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


@contextmanager
def one_writer(*folders: Path) -> Iterator[None]:
    """Lock folders during a `with` block; missing folders are created.

    They are locked in sorted order: of two processes that want the same folders, one gets all.
    """
    with ExitStack() as taken:
        for folder in sorted(folders, key=lambda one: one.resolve()):
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise not_writable(folder, error) from error
            taken.enter_context(FolderLock(folder))
        yield


def not_writable(folder: Path, error: OSError) -> ValueError:
    return ValueError(f"{folder} cannot be written ({error.strerror or error}): choose another")


def remove_dead_lock(folder: Path) -> None:
    """Remove the lock file of a killed process; the lock of a live process stays."""
    if (folder / LOCK).exists():
        with suppress(ValueError):  # a live process has it
            FolderLock(folder).release()


_HELD: list[FolderLock] = []


def _leave_to_parent() -> None:
    """Close inherited locks in a forked worker: it would hold them after its parent has ended."""
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
    """Lock a file; False if another process has locked it, None if the file system has no locks."""
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
            raise not_writable(folder, error) from error
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
        os.close(handle)  # the process that had it has just removed it: try again


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
