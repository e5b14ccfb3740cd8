"""A cache of what rounds cost on this machine, valid for a day, for repeated commands."""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from dataclasses import dataclass
from pathlib import Path

from fedlens.recipes.pace import Cost, Pace, Rounds, Work
from fedlens.runs.manifest import machine
from fedlens.setup import Setup
from fedlens.storage.files import write_atomically

SECONDS = 24 * 3600.0  # after that, the load of the machine may differ


@dataclass(frozen=True)
class Remembered:
    """Costs by a hash of what they depend on, a small file each; an unusable folder is ignored."""

    folder: Path

    def get(self, kind: str, setup: Setup) -> Cost | None:
        place = self._place(kind, setup)
        with contextlib.suppress(OSError, ValueError, TypeError):
            if 0 <= time.time() - place.stat().st_mtime < SECONDS:
                return _cost(place.read_text())
        return None

    def put(self, kind: str, setup: Setup, cost: Cost) -> None:
        with contextlib.suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            write_atomically(self._place(kind, setup), json.dumps(cost).encode())

    def _place(self, kind: str, setup: Setup) -> Path:
        """The file of a cost. Other machines, data and versions of Fedlens have other files."""
        known = [kind, machine(setup), setup.engine.num_workers, setup.dataset.digest]
        digest = hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()
        return self.folder / f"{digest}.json"


def _cost(text: str) -> Cost:
    start, ((work, seconds), a_step, an_example), an_evaluation = json.loads(text)
    timed = Rounds(Work(*map(float, work)), float(seconds))
    return Cost(float(start), Pace(timed, float(a_step), float(an_example)), float(an_evaluation))
