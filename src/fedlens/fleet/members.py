"""Whose keys a server has: read again while it serves, so that sites come and go without a restart.

A site keeps its number, by which it was approved, whichever other keys come and go.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Protocol

from fedlens.fleet import Notify
from fedlens.fleet.keys import INVITED, invited, public_keys
from fedlens.fleet.log import Log
from fedlens.storage.files import write_atomically

FILE = "members.json"  # in the folder of a server: what its processes know of the sites


@dataclass(frozen=True)
class Member:
    """A site that a server knows."""

    number: int  # its place among all that it ever knew
    node: int | None = None  # Flower's id, if it has its key
    invited: bool = False  # and has not come yet
    key: str = ""  # a hash of its key

    @property
    def expected(self) -> bool:
        return self.invited or self.node is not None


def read_members(home: Path) -> dict[str, Member]:
    path = home / FILE
    found = json.loads(path.read_bytes()) if path.is_file() else {}
    return {name: Member(**one) for name, one in found.items()}


class Link(Protocol):
    """What is asked of a SuperLink."""

    def register(self, public: Mapping[str, bytes]) -> dict[str, int]:
        """Register these keys and no others; node ids, by name."""


@dataclass
class Members:
    """The members of a server in `home`, as its folder of keys has them; `names` is the gate's."""

    keys: Path
    home: Path
    link: Link
    notify: Notify
    names: dict[bytes, str] = field(default_factory=dict)
    _seen: object = None  # the files when they were last read

    def refresh(self) -> None:
        """Take in what changed: sites that came, were withdrawn, or have new keys."""
        files = [*self.keys.glob("*.pub"), *self.keys.glob(f"*{INVITED}")]
        found = sorted((path.name, path.stat().st_mtime_ns) for path in files)
        if found == self._seen:
            return
        first, self._seen = self._seen is None, found
        try:
            public, asked = public_keys(self.keys), invited(self.keys)
        except (OSError, ValueError) as error:
            if first:
                raise
            self.notify(f"the keys stay as they were: {error}")
            return
        nodes, before = self.link.register(public), read_members(self.home)
        now = dict[str, Member]()
        for name in [*before, *sorted({*public, *asked} - before.keys())]:
            known = public.get(name)
            key = "" if known is None else sha256(known).hexdigest()
            now[name] = Member(len(now), nodes.get(name), name in asked and known is None, key)
        write_atomically(
            self.home / FILE, json.dumps({n: asdict(m) for n, m in now.items()}).encode()
        )
        # The gate reads this dict in another thread: new names come in before old ones go.
        self.names |= {content: name for name, content in public.items()}
        for content in self.names.keys() - set(public.values()):
            del self.names[content]
        for name, one in now.items():
            self._say(name, before.get(name), one)

    def _say(self, name: str, before: Member | None, now: Member) -> None:
        """Write down what became of a site, where that is new."""
        was = before.key if before else ""
        if was == now.key:
            return
        event = "withdrawn" if not now.key else "added" if not was else "key renewed"
        Log(self.home).add(event, site=name, key=now.key or was)
        self.notify(f"{name}: {event}")
