"""How much memory is free, so that what cannot fit is refused before it is allocated.

How many cores this process may use.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

GROUPS = (  # the files of cgroups, by which containers and schedulers limit memory
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


def demand(what: str, parts: Mapping[str, int], remedy: str) -> None:
    """Raise a ValueError if `parts`, in bytes, need more memory together than is free."""
    needed, free = sum(parts.values()), available()
    if needed <= free:
        return
    listed = ", ".join(f"{name} {in_words(size)}" for name, size in parts.items() if size)
    raise ValueError(
        f"{what} needs about {in_words(needed)} of memory ({listed}), but "
        f"{in_words(free)} are free: {remedy}"
    )


def available() -> int:
    """The bytes that this process can still allocate, by all limits that can be read."""
    limits = [_physical()]
    for most, used in GROUPS:
        limit, now = _number(Path(most)), _number(Path(used))
        if limit is not None and now is not None:
            limits.append(limit - now)
    limits.append(_address_space())
    return max(min(limits), 0)


def in_words(size: int) -> str:
    """A number of bytes as text with a unit."""
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB")):
        if size >= unit:
            scaled = size / unit
            return f"{scaled:,.1f} {name}" if scaled < 1e6 else f"{scaled:.1e} {name}"
    return f"{size:,} bytes"


UNKNOWN = 1 << 62
"""Stands for a limit that does not exist or cannot be read."""


def _physical() -> int:
    """The bytes that the machine can provide without swapping."""
    try:
        with Path("/proc/meminfo").open(encoding="ascii") as file:
            found = dict(line.split(":", 1) for line in file)
        return int(found["MemAvailable"].split()[0]) * 1024
    except (OSError, ValueError, LookupError):
        pass
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return UNKNOWN


def _address_space() -> int:
    try:
        import resource

        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
        if limit == resource.RLIM_INFINITY:
            return UNKNOWN
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        return limit - pages * resource.getpagesize()
    except (ImportError, OSError, ValueError):
        return UNKNOWN


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text(encoding="ascii"))  # "max": there is no limit
    except (OSError, ValueError):
        return None


def num_cores() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
