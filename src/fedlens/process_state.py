"""What another process of this machine is doing: whether it lives, whether it was stopped."""

from __future__ import annotations

import os
from pathlib import Path


def is_alive(pid: int) -> bool:
    """Whether there is such a process, whosever it is.

    A zombie, which has ended and was not waited for by its parent yet, is dead.
    """
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # it is another user's
    return _letter(pid) != "Z"


def is_stopped(pid: int) -> bool:
    """Whether it stands still until it is told to go on, as after Ctrl-Z."""
    return _letter(pid) == "T"


def _letter(pid: int) -> str:
    """Its state as Linux writes it; nothing where that cannot be read."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return stat.rpartition(")")[2].split()[0]  # its name, before that, may hold anything
