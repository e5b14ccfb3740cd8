"""What a private run has spent, for its records, its summary and the ledger of its data."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedlens.config.experiment import as_plain
from fedlens.config.protection import protection_of
from fedlens.privacy.accountant import epsilon
from fedlens.privacy.events import Release
from fedlens.privacy.ledger import Entry, Ledger
from fedlens.setup import Setup

OF_KEYS = (  # where noise is drawn by key
    "the seed, by which noise is drawn: whoever knows it can take the noise away; with a ledger, "
    "the salt in manifest.json, too",
    "other runs of the same seed, without a ledger: they have the same noise, which is gone in "
    "their difference",
)
NOT_COVERED = (
    "who takes part in a round, and how many batches and examples are seen (rounds.jsonl)",
    "who holds what (partition.json, manifest.json, emd in summary.json, the page)",
    "the pixels' mean and deviation, if they are measured on the training images",
    "the test and validation images, on which accuracies are measured and probabilities calibrated",
    "other runs on these clients: each costs what it costs, and they add up",
)
KEPT = "what clients keep for themselves between rounds (the checkpoint)"
SIZES = "how many examples each client holds (shares of updates, numbers of steps)"
ANOTHER = "this federation: epsilon is that of one with {} clients, {} of them expected in a round"


class Spending:
    """Counts the releases of a run's rounds, each before it takes place."""

    def __init__(self, setup: Setup) -> None:
        given = setup.experiment.privacy
        assert given is not None
        self.setup, self.given = setup, given
        self.releases: Counter[Release] = Counter()
        self.examples = setup.examples if given.unit == "example" else None
        self.rounds = 0  # counted so far
        self.ledger = None if given.ledger is None else Ledger(Path(given.ledger))

    def entries(self, round: int) -> list[Entry]:
        """What round 0, 1, ... releases, as the ledger keeps it."""
        data, unit, run = self.setup.dataset, self.given.unit, self.setup.run_id
        found = [(round + 1, one) for one in self._released(round)]
        if self.examples is not None and self.examples.count_noise and not round:
            found = [(0, Release(self.examples.count_noise)), *found]  # before the first round
        return [Entry(data.digest, data.name, unit, run, number, one) for number, one in found]

    def check(self) -> None:
        """Raise a ValueError if the ledger cannot be written, or has no room for a round."""
        if self.ledger is not None:
            self.ledger.check_writable()
            if not self._fits(0):
                raise ValueError(f"{self.ledger.why_not(1)}: nothing was run")

    def resume(self, done: int) -> None:
        """Count the rounds of a resumed run; a ValueError if its ledger does not have the last."""
        self.count(*range(done))
        if self.ledger is None or not done:
            return
        if not all(self.ledger.has(one) for one in self.entries(done - 1)):
            raise ValueError(
                f"{self.ledger.path} lacks round {done} of this run, and what was spent is "
                "unknown: put the old file back"
            )

    def order(self, round: int) -> str:
        """Put a round into the ledger, before it runs; return why the next one cannot run."""
        if self.ledger is None:
            return ""
        self.ledger.order(self.entries(round))
        return "" if self._fits(round + 1) else self.ledger.why_not(round + 2)

    def _fits(self, round: int) -> bool:
        assert self.ledger is not None
        entries = self.entries(round)
        more = [one.release for one in entries]
        return not more or self.ledger.allows(entries[0].data, entries[0].unit, more)

    def count(self, *rounds: int) -> None:
        """Add what these rounds, counted from 0, have released."""
        for round in rounds:
            self.rounds = round + 1
            if self.examples is None:
                self.releases.update(self._released(round))

    def _released(self, round: int) -> list[Release]:
        by = self.setup.program.algorithm if self.examples is None else self.examples
        return by.releases(round)

    def epsilon(self) -> float:
        """What all counted rounds cost together."""
        if self.examples is not None:
            return self.examples.epsilon(self.rounds, self.given.delta)
        spent = [replace(one, count=count) for one, count in self.releases.items()]
        return epsilon(spent, self.given.delta) if spent else 0.0

    def summary(self) -> dict[str, Any]:
        given = self.given
        common = {
            "unit": given.unit,
            "epsilon": self.epsilon(),
            "delta": given.delta,
            "clip": as_plain(given.clip),
            "mechanism": as_plain(given.mechanism),
            "accountant": "privacy loss distributions, an upper bound",
            "ledger": given.ledger,
        }
        elsewhere = self.setup.engine.reporting is not None  # then sites draw the noise
        listed = [*(() if elsewhere else OF_KEYS), *NOT_COVERED]
        if self.examples is not None:
            return common | {
                "noise": self.examples.noise,
                "sampling": "poisson",
                "neighbouring": "add-remove",
                "clients": len(self.examples.rates),
                "by_client": self.examples.spread(self.rounds, given.delta),
                "count_noise": given.count_noise,
                "not_covered": [SIZES, *listed],
            }
        protection = protection_of(self.setup.experiment)
        (*_, last) = protection.released(protection.rounds)
        if given.noise_cohort is not None:
            sizes = (f"{n:,}" for n in (protection.population, protection.noise_cohort))
            listed.insert(0, ANOTHER.format(*sizes))
        if self.setup.program.algorithm.remembers and not elsewhere:
            listed.append(KEPT)
        return common | {
            "noise": protection.noise,
            "sampling": protection.sampling,
            "neighbouring": last.neighbours,
            "clients": protection.population,
            "cohort": protection.noise_cohort,
            "noise_cohort": given.noise_cohort,
            "not_covered": listed,
        }
