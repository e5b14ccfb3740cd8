"""How the sites of a server stand, for its page and for `fedlens fleet status`.

The process of a run writes it down beside the server's log, whenever it changes; others read it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from fedlens.report.blocks import Block, Table
from fedlens.storage.files import write_atomically
from fedlens.storage.reading import printable, shortened
from fedlens.storage.words import count_of

FILE = "status.json"
DOING = {
    "sizes": "asked how much it holds",
    "train": "training",
    "test": "testing the model",
    "keep": "getting the final model",
    "keys": "making keys for a sum",
    "shares": "sharing them",
    "agree": "asked whose numbers are in the sum",
    "open": "opening the sum",
}
HEADER = ["site", "now", "last answer", "updates used", "rounds behind", "MB from it", "MB to it"]


@dataclass
class Standing:
    """How a site stands."""

    here: bool = False
    asked: str = ""  # what it has not answered yet
    answer: str = "none yet"  # what became of its last answer
    why: str = ""  # what is wrong with it, until the round ends
    used: int = 0  # how many of its updates are in the model
    last: int = 0  # the round of the last one; 0: none
    trained: int = 0  # how many updates it has sent
    got: int = 0  # bytes of tensors from it
    sent: int = 0  # and to it
    epsilon: float | None = None  # what its updates have cost each of its examples

    @property
    def now(self) -> str:
        return (DOING.get(self.asked, "here")) if self.here else "away"


@dataclass
class Status:
    """How a run of a fleet stands, in the folder of its server."""

    home: Path
    experiment: str = ""  # the hash of its terms
    out: str = ""  # the run folder
    rounds: int = 0
    round: int = 0  # the last one that ended
    begun: bool = False  # whether it trains, and the run folder is its own
    ended: str = ""  # the status of the run, at its end
    sites: dict[str, Standing] = field(default_factory=dict)

    @classmethod
    def read(cls, home: Path) -> Status:
        """What was last written down; an OSError or a ValueError if nothing was."""
        found = json.loads((home / FILE).read_bytes())
        if not isinstance(found, dict):
            raise ValueError(f"{home / FILE} is damaged: it comes back when a server is started")
        known = {one.name for one in fields(cls)} - {"home", "sites"}
        sites = {name: Standing(**one) for name, one in found.get("sites", {}).items()}
        return cls(home, sites=sites, **{key: found[key] for key in known & found.keys()})

    def go_on(self) -> None:
        """Take over what was written down of the same experiment, which is resumed."""
        if (self.home / FILE).is_file():
            before = Status.read(self.home)
            if before.experiment == self.experiment:
                self.round, self.begun = before.round, before.begun
                for name in self.sites.keys() & before.sites.keys():
                    self.sites[name] = replace(before.sites[name], here=False, asked="", why="")

    def plain(self) -> dict[str, Any]:
        return {key: part for key, part in asdict(self).items() if key != "home"}

    def write(self) -> None:
        write_atomically(self.home / FILE, json.dumps(self.plain()).encode())

    def seen(self, here: Sequence[str]) -> None:
        """Note which sites are here."""
        before = {name for name, one in self.sites.items() if one.here}
        if before != {*here}:
            for name, one in self.sites.items():
                one.here = name in here
            self.write()

    def asks(self, what: str, names: Sequence[str], size: int) -> None:
        for name in names:
            one = self.sites[name]
            one.asked, one.sent = what, one.sent + size
        self.write()

    def answered(self, name: str, failed: bool, size: int) -> None:
        one = self.sites[name]
        one.trained += one.asked == "train" and not failed
        if not failed and one.asked != "keep":  # what became of its last update tells more
            one.answer = f"{DOING.get(one.asked, 'asked')}: done"
        one.asked, one.why, one.got = "", "", one.got + size
        self.write()

    def fails(self, name: str, why: str) -> None:
        """Note what is wrong with an answer, or with a site that gave none."""
        self.sites[name].why = printable(shortened(why))
        self.write()

    def ends(self, round: int, used: Sequence[str], failed: Mapping[str, str]) -> None:
        """Note the end of a round: whose updates were used, and what became of the others."""
        self.round = round
        for name, one in self.sites.items():
            if name in used:
                one.used, one.last, one.answer = one.used + 1, round, f"used in round {round}"
            elif name in failed:
                outcome = failed[name]
                why = one.why.removeprefix(outcome).removeprefix(": ")
                one.answer = f"{outcome} in round {round}{why and f': {why}'}"
            one.asked, one.why = "", ""
        self.write()

    def headline(self) -> str:
        """A sentence on how far the run is."""
        here = sum(one.here for one in self.sites.values())
        sites = f"{here} of {count_of(len(self.sites), 'site')} here"
        if not self.begun:
            return f"waiting for sites: {sites}"
        how = self.ended or f"{self.round} of {count_of(self.rounds, 'round')}"
        return f"experiment {self.experiment[:12]}: {how}; {sites}"

    def rows(self) -> tuple[list[str], list[list[str]]]:
        """A table of the sites: its header, and a row for each."""
        private = any(one.epsilon is not None for one in self.sites.values())
        return [*HEADER, *["ε"] * private], [
            [
                *(name, one.now, one.why or one.answer, f"{one.used:,}"),
                f"{self.round - one.last:,}",
                *(f"{size / 1e6:,.2f}" for size in (one.got, one.sent)),
                *["–" if one.epsilon is None else f"{one.epsilon:.3g}"] * private,
            ]
            for name, one in self.sites.items()
        ]


@dataclass(frozen=True)
class Page:
    """What the live page of a fleet has besides its run (`report.live.Beside`)."""

    home: Path
    title: str

    @property
    def file(self) -> Path:
        return self.home / FILE

    @property
    def begun(self) -> bool:
        return self._status.begun

    @property
    def _status(self) -> Status:
        return Status.read(self.home) if self.file.is_file() else Status(self.home)

    def headline(self) -> str:
        return self._status.headline()

    def blocks(self) -> list[Block]:
        header, rows = self._status.rows()
        caption = (
            "Whether each site is here, what became of its last answer, how many of its updates "
            "are in the model, for how many rounds none was, and what was sent."
        )
        return [Table(title="Sites", caption=caption, header=header, rows=rows)]
