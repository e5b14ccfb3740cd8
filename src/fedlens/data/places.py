"""Where data sets are looked for."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Source:
    """Where a run looks for its data: every data set is handed one."""

    data: Path | None = None  # the folder named by --data
    base: Path = field(default_factory=Path.cwd)  # what an option `path` is relative to

    def resolve(self, path: str) -> Path:
        """The file or folder that an option `path` means."""
        return self.base / Path(path).expanduser()


class Damaged(ValueError):
    """A file that is not what it should be."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(f"{path} is damaged ({why})")
        self.path = path


def cache() -> Path:
    """The user's own folder for data sets, where `fedlens data get` puts them."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "fedlens"


def roots(source: Source) -> list[Path]:
    """The folders searched for named data sets, in this order."""
    named = os.environ.get("FEDLENS_DATA")
    places = [source.data, Path(named).expanduser() if named else None, cache()]
    return list(dict.fromkeys(place for place in places if place is not None))
