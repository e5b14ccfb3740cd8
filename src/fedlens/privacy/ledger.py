"""A ledger: what was spent on data over all experiments, in a file that one can only append to.

Each line has an entry, and is chained to those before it (`storage.chained`). That last lines were
cut off is not seen. A line is on the disk before anything that it stands for leaves a client, so a
last line that is torn, by a kill or a full disk, stands for nothing, and the next one replaces it.
"""

from __future__ import annotations

import fcntl
import math
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from fedlens.privacy import accountant
from fedlens.privacy.events import Release
from fedlens.storage.chained import append, chained, parsed, written

BEGINNING = "a ledger of fedlens"


class LimitReached(ValueError):
    """What would be spent is more than the ledger allows."""


@dataclass(frozen=True)
class Entry:
    """What a round of a run releases of some data."""

    data: str  # a hash of the images and labels
    name: str  # of the data set
    unit: str
    run: str
    round: int  # from 1; 0: before them
    release: Release


@dataclass(frozen=True)
class Limit:
    """The most that may be spent on each data set, and each unit."""

    epsilon: float
    delta: float


def total(releases: Sequence[Release], delta: float) -> float:
    """What releases cost together, whatever their neighbouring relations.

    If these differ, all are counted by "replace", which is the stricter one.
    """
    if len({one.neighbours for one in releases}) > 1:
        releases = [replace(one, neighbours="replace") for one in releases]
    return accountant.epsilon(releases, delta)


class Ledger:
    """The ledger in a file. Several processes may append to it in turns."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.entries: list[Entry] = []
        self.limit: Limit | None = None
        self._counts: dict[tuple[str, str], Counter[Release]] = {}
        self._known: dict[tuple[str, int], Release] = {}
        self.chains = [BEGINNING]  # then those of the lines
        self._end = 0
        if path.exists():
            try:
                with path.open("rb") as file:
                    self._read(file.fileno())
            except OSError as error:
                raise self._denied("read", error) from error

    def has(self, entry: Entry) -> bool:
        return (entry.run, entry.round) in self._known

    def spent(self, data: str, unit: str) -> list[Release]:
        counts = self._counts.get((data, unit), Counter())
        return [replace(one, count=count * one.count) for one, count in counts.items()]

    def allows(self, data: str, unit: str, more: Sequence[Release]) -> bool:
        """Whether the limit leaves room for more of these releases."""
        if self.limit is None:
            return True
        return total([*self.spent(data, unit), *more], self.limit.delta) <= self.limit.epsilon

    def order(self, entries: Sequence[Entry]) -> None:
        """Append what a round will release. A round that is resumed is in the ledger already."""
        handle = self._open()
        try:
            self._read(handle)
            known = self._known
            for one in entries:
                before = known.get((one.run, one.round), one.release)
                if before != one.release:
                    raise ValueError(
                        f"{self.path}: round {one.round} of this run released {before}, and not "
                        f"{one.release}: put the old keys of [privacy] back, or start a new run"
                    )
            new = [one for one in entries if not self.has(one)]
            if new:
                last = new[-1]
                if not self.allows(last.data, last.unit, [one.release for one in new]):
                    raise LimitReached(self.why_not(last.round))
                self._append(handle, [{"entry": asdict(one)} for one in new])
        finally:
            os.close(handle)

    def why_not(self, round: int) -> str:
        assert self.limit is not None
        return (
            f"round {round} would pass the limit of {self.path}, epsilon {self.limit.epsilon:g} at "
            f"delta {self.limit.delta:g}"
        )

    def set_limit(self, limit: Limit) -> None:
        accountant.check_delta(limit.delta)
        if not 0 < limit.epsilon < math.inf:
            raise ValueError(f"limit is {limit.epsilon}: choose a finite number above 0")
        handle = self._open()
        try:
            self._read(handle)
            self._append(handle, [{"limit": asdict(limit)}])
        finally:
            os.close(handle)

    def check_writable(self) -> None:
        try:
            os.close(self._open())
        except OSError as error:
            raise self._denied("written", error) from error

    def _denied(self, what: str, error: OSError) -> ValueError:
        return ValueError(f"{self.path} cannot be {what} ({error.strerror}): choose another ledger")

    def _open(self) -> int:
        """Open the file, and wait until no other process appends to it."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        is_new = not self.path.exists()
        handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        fcntl.flock(handle, fcntl.LOCK_EX)  # ends when it is closed
        if is_new:
            folder = os.open(self.path.parent, os.O_RDONLY | os.O_CLOEXEC)
            os.fsync(folder)
            os.close(folder)
        return handle

    def _read(self, handle: int) -> None:
        """Read the lines that are new since the last time."""
        size = os.fstat(handle).st_size
        if size < self._end:
            raise self._changed("it has become shorter")
        new = b""
        while part := os.pread(handle, size - self._end, self._end + len(new)):
            new += part
        whole, _, _torn = new.rpartition(b"\n")
        for line in whole.split(b"\n") if whole else ():
            number = len(self.chains)
            try:
                content, chain = parsed(line)
                if chain != chained(self.chains[-1], content):
                    raise self._changed(f"line {number} is not what was written")
                self._take(content)
                self.chains.append(chain)
            except (LookupError, TypeError, AttributeError, ValueError) as error:
                if isinstance(error, ValueError) and str(error).startswith(str(self.path)):
                    raise
                raise self._changed(f"line {number} cannot be read") from error
            self._end += len(line) + 1

    def _changed(self, how: str) -> ValueError:
        return ValueError(
            f"{self.path} was changed ({how}), and what was spent is unknown: put the old file back"
        )

    def _take(self, content: dict[str, Any]) -> None:
        if "limit" in content:
            self.limit = Limit(**content["limit"])
        else:
            entry = dict(content["entry"])
            one = Entry(**{**entry, "release": Release(**entry["release"])})
            self.entries.append(one)
            self._known[one.run, one.round] = one.release
            self._counts.setdefault((one.data, one.unit), Counter())[one.release] += 1

    def _append(self, handle: int, contents: Sequence[dict[str, Any]]) -> None:
        lines, chain = b"", self.chains[-1]
        for content in contents:
            line, chain = written(chain, content)
            lines += line
        append(handle, self._end, lines)
        self._read(handle)
