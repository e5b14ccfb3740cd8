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
from fedlens.fleet.account import Account
from fedlens.fleet.log import Log
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
class Offer:
    """An experiment, and as what this site would take part in it."""

    text: str  # the terms
    client: int  # which client of the experiment the site is
    data: str  # the identity of its examples
    size: int = 0  # how many they are, if that decides what privacy costs

    @cached_property
    def terms(self) -> Terms:
        return Terms(self.text)

    def check(self, client: int, data: str) -> None:
        """Raise Refused if the site is asked as another client, or has other examples."""
        if client != self.client:
            raise Refused(
                f"it is asked as client {client}, and was approved as client {self.client}: {AGAIN}"
            )
        if data != self.data:
            raise Refused(
                "its examples are not those that it had when it was approved: put them back as "
                f"they were, or {AGAIN}"
            )


@dataclass(frozen=True)
class Approval:
    """An approved offer. Approving it again replaces this, and so allows another run."""

    offer: Offer
    by: str  # the name of a user
    at: str
    updates: tuple[str, ...] = ()  # digests of all that they were computed from
    models: tuple[str, ...] = ()  # digests of those that were tested

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

    def offer(self, offer: Offer) -> None:
        self._write(self.home / "offered", offer, offer)
        for path in self._offered()[MOST_OFFERS:]:
            path.unlink(missing_ok=True)

    def offers(self) -> list[Offer]:
        """What was offered and is not approved yet, the newest first."""
        found = []
        for path in self._offered():
            try:
                offer: Offer = check(json.loads(path.read_bytes()), Offer, str(path))
                found += [offer] if offer.terms.hash == path.stem else []
            except ValueError as error:  # of another version of Fedlens, or damaged
                logger.warning("%s is left out: %s", path, error)
        return found

    def approved(self) -> list[str]:
        return [path.stem for path in self._folder.glob("*.json")]

    def approve(self, offer: Offer) -> None:
        now = time.strftime("%Y-%m-%d %H:%M:%S %z")
        with one_writer(self._folder):
            if offer.terms.privacy is not None:
                Account(self.home).begin()
            by = getpass.getuser()
            Log(self.home).add("approved", experiment=offer.terms.hash, client=offer.client, by=by)
            self._write(self._folder, offer, Approval(offer, by, now))
        (self.home / "offered" / f"{offer.terms.hash}.json").unlink(missing_ok=True)

    def withdraw(self, wanted: str) -> None:
        """Take an approval back: from now on its orders are refused."""
        with one_writer(self._folder):
            (self._folder / f"{wanted}.json").unlink(missing_ok=True)
            Log(self.home).add("withdrawn", experiment=wanted, by=getpass.getuser())

    def of(self, wanted: str) -> Approval:
        """The approval of an experiment, by its hash; Refused if there is none."""
        if wanted not in self.approved():
            raise Refused(
                f"experiment {wanted[:12]} is not approved here: see `fedlens fleet approve`"
            )
        path = self._folder / f"{wanted}.json"
        approval: Approval = check(json.loads(path.read_bytes()), Approval, str(path))
        if approval.offer.terms.hash != wanted:
            raise ValueError(f"{path} was changed: approve the experiment again")
        return approval

    def change(self, wanted: str, change: Callable[[Approval], Approval]) -> None:
        """Replace an approval by a changed one. An order waits while another one changes it."""
        with one_writer(self._folder):
            before = self.of(wanted)
            after = change(before)
            if after != before:
                self._write(self._folder, after.offer, after)

    @property
    def _folder(self) -> Path:
        return self.home / "approved"

    def _write(self, folder: Path, offer: Offer, what: Offer | Approval) -> None:
        content = json.dumps(asdict(what)).encode()
        write_atomically(folder / f"{offer.terms.hash}.json", content)

    def _offered(self) -> list[Path]:
        paths = (self.home / "offered").glob("*.json")
        return sorted(paths, key=lambda path: path.stat().st_mtime_ns, reverse=True)
