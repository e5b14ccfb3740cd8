"""What a site was offered, what a person there has approved, and how far that is used up."""

from __future__ import annotations

import getpass
import json
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from fedlens.config.options import check
from fedlens.fleet.policy import Refused
from fedlens.fleet.terms import Terms
from fedlens.storage.files import write_atomically
from fedlens.storage.locks import one_writer

logger = logging.getLogger(__name__)

MOST_OFFERS = 8  # that are kept; older ones are deleted
AGAIN = "approve the experiment again for another run"

Kind = Literal["updates", "models"]
"""What is counted."""


@dataclass(frozen=True)
class Approval:
    """An approved experiment. Approving it again replaces this, and so allows another run."""

    text: str  # the terms
    by: str  # the name of a user
    at: str
    client: int | None = None  # which client of the experiment the site is
    data: str | None = None  # the identity of its examples
    updates: tuple[str, ...] = ()  # digests of all that they were computed from
    models: tuple[str, ...] = ()  # digests of those that were tested

    @cached_property
    def terms(self) -> Terms:
        return Terms(self.text)

    def begun(self, client: int, data: str, anew: bool) -> Approval:
        """The approval with these two fixed. Only before any update may a run begin anew."""
        if self.client is None or (anew and not self.updates and not self.models):
            return replace(self, client=client, data=data)
        if client != self.client:
            raise Refused(
                f"it is asked as client {client}, and was client {self.client} when the run began: "
                f"{AGAIN}"
            )
        if data != self.data:
            raise Refused(
                "its examples are not those that it had when the run began: put them back as they "
                f"were, or {AGAIN}"
            )
        return self

    def used(self, kind: Kind, digests: Iterable[str], most: int) -> Approval:
        """With these counted. Refused beyond `most`; a repeated one is free."""
        known = tuple(dict.fromkeys((*getattr(self, kind), *digests)))
        if len(known) > most:
            raise Refused(f"it was asked for more than the {most} {kind} approved: {AGAIN}")
        counted: dict[str, Any] = {kind: known}
        return replace(self, **counted)


@dataclass(frozen=True)
class Approvals:
    """The offers and the approvals in a site's own folder, by the hash of their terms."""

    home: Path

    def offer(self, terms: Terms) -> None:
        write_atomically(self.home / "offered" / f"{terms.hash}.json", terms.text.encode())
        for path in self._offered()[MOST_OFFERS:]:
            path.unlink(missing_ok=True)

    def offers(self) -> list[Terms]:
        """What was offered and is not approved yet, the newest first."""
        found = []
        for path in self._offered():
            try:
                found.append(Terms(path.read_text()))
            except ValueError as error:  # of another version of Fedlens, or damaged
                logger.warning("%s is left out: %s", path, error)
        return found

    def approved(self) -> list[str]:
        return [path.stem for path in self._folder.glob("*.json")]

    def approve(self, terms: Terms) -> None:
        now = time.strftime("%Y-%m-%d %H:%M:%S %z")
        with one_writer(self._folder):
            self._write(terms.hash, Approval(terms.text, getpass.getuser(), now))
        (self.home / "offered" / f"{terms.hash}.json").unlink(missing_ok=True)

    def of(self, wanted: str) -> Approval:
        """The approval of an experiment, by its hash; Refused if there is none."""
        if wanted not in self.approved():
            raise Refused(
                f"experiment {wanted[:12]} is not approved here: see `fedlens fleet approve`"
            )
        path = self._folder / f"{wanted}.json"
        approval: Approval = check(json.loads(path.read_bytes()), Approval, str(path))
        if approval.terms.hash != wanted:
            raise ValueError(f"{path} was changed: approve the experiment again")
        return approval

    def change(self, wanted: str, change: Callable[[Approval], Approval]) -> None:
        """Replace an approval by a changed one. An order waits while another one changes it."""
        with one_writer(self._folder):
            before = self.of(wanted)
            after = change(before)
            if after != before:
                self._write(wanted, after)

    @property
    def _folder(self) -> Path:
        return self.home / "approved"

    def _write(self, wanted: str, approval: Approval) -> None:
        write_atomically(self._folder / f"{wanted}.json", json.dumps(asdict(approval)).encode())

    def _offered(self) -> list[Path]:
        paths = (self.home / "offered").glob("*.json")
        return sorted(paths, key=lambda path: path.stat().st_mtime_ns, reverse=True)
