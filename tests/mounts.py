"""Real mounts for tests, in a namespace that only a child process sees."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import traceback
from collections.abc import Callable
from pathlib import Path

from tests.children import fork

OWN_MOUNTS, OWN_USERS = 0x00020000, 0x10000000  # CLONE_NEWNS, CLONE_NEWUSER


def mount(*words: object) -> None:
    subprocess.run(["mount", *map(str, words)], check=True, capture_output=True)


def mount_disk(folder: Path, kilobytes: int) -> None:
    """A disk of its own, and of this size, in the place of a folder."""
    folder.mkdir(exist_ok=True)
    mount("-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", folder)


def fill(folder: Path, kilobytes: int = 0) -> Path:
    """Leave so much of the disk that a folder is on; who removes the file has the rest again."""
    filler = folder / "filler"
    filler.write_bytes(bytes(shutil.disk_usage(folder).free - kilobytes * 1024))
    return filler


def mount_read_only(folder: Path) -> None:
    mount("--bind", folder, folder)
    mount("-o", "remount,bind,ro", folder)


def why_not_in_own_mounts(work: Callable[[], object]) -> str:
    """Do `work` in a child process that may mount what it likes; the traceback if that failed."""
    told, tell = os.pipe()
    child = fork()
    if child:
        os.close(tell)
        with os.fdopen(told) as file:
            why = file.read()
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        return why or (f"it ended with status {status}" if status else "")
    try:
        os.set_inheritable(tell, False)
        _unshare()
        work()
        os._exit(0)
    except BaseException:
        os.write(tell, traceback.format_exc().encode()[-60_000:])
    finally:
        os._exit(1)


def _unshare() -> None:
    """Have mounts of one's own; who is not root is, among users of their own."""
    user, group = os.geteuid(), os.getegid()
    if ctypes.CDLL(None).unshare(OWN_MOUNTS | (OWN_USERS if user else 0)):
        raise OSError("no mounts of one's own")
    if user:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    mount("--make-rprivate", "/")
