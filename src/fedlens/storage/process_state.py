"""The state of another process on this machine: whether it is alive, whether it is stopped."""

from __future__ import annotations

import os
from pathlib import Path


def is_alive(pid: int) -> bool:
    """Whether the process exists, whichever user it belongs to.

    A zombie, which has ended but was not yet waited for by its parent, counts as dead.
    """
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # it belongs to another user
    return _letter(pid) != "Z"


def is_stopped(pid: int) -> bool:
    """Whether the process is stopped until it gets SIGCONT, as after Ctrl-Z."""
    return _letter(pid) == "T"


def _letter(pid: int) -> str:
    """The state letter of a process in Linux's /proc; "" if it cannot be read."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return stat.rpartition(")")[2].split()[0]  # the name before ")" may contain anything
