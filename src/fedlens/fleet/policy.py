"""What a site allows, whichever server asks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fedlens.config.options import check
from fedlens.config.sections import demand
from fedlens.fleet.terms import Terms
from fedlens.storage.tables import read_tables

FILE = "policy.toml"
DEFAULT = """\
# What this site allows, also of experiments that it has approved.

# algorithms = ["fedavg", "scaffold"]   # no others; without this line, any
most_rounds = 10000                     # of one experiment
label_counts = false                    # whether a server may learn how many examples it has of
                                        # each class: told, or by tests on held-out examples
least_held_out = 10                     # models are tested on this many examples, or not at all
# largest_norm = 100.0                  # an update longer than this does not leave
own_code = []                           # import paths of code besides Fedlens' that may run here

# [privacy]           # the most that it ever gives on its data, over all experiments and servers:
# unit = "example"    # nothing without differential privacy of each example, and
# epsilon = 8.0       # no order whose answer would pass this epsilon
# delta = 1e-5
"""


class Refused(Exception):
    """The site refuses an order; the message says why."""


@dataclass(frozen=True)
class Budget:
    """The most that a site ever gives on its data, over experiments and servers."""

    epsilon: float
    delta: float
    unit: Literal["example", "client"] = "example"

    def __post_init__(self) -> None:
        demand(self.epsilon > 0, "privacy.epsilon", self.epsilon, "choose a number above 0")
        demand(0 < self.delta < 1, "privacy.delta", self.delta, "choose one between 0 and 1")

    def __str__(self) -> str:
        return f"epsilon {self.epsilon:g} at delta {self.delta:g} for each {self.unit}"


@dataclass(frozen=True)
class Policy:
    algorithms: tuple[str, ...] | None = None
    most_rounds: int = 10000
    label_counts: bool = False
    least_held_out: int = 10
    largest_norm: float | None = None
    own_code: tuple[str, ...] = ()
    privacy: Budget | None = None

    @classmethod
    def read(cls, home: Path) -> Policy:
        path = home / FILE
        if not path.is_file():
            return cls()
        policy: Policy = check(read_tables(path), cls, str(path))
        return policy

    def check(self, terms: Terms) -> None:
        """Raise Refused if this site does not allow the experiment.

        Code of its own is checked first: nothing that the terms name is imported before.
        """
        foreign = [name for name in terms.own_code if name not in self.own_code]
        if foreign:
            named = ", ".join(foreign)
            raise Refused(f"its policy does not allow code of its own, {named}: {_see('own_code')}")
        if self.algorithms is not None:
            others = [name for name in terms.algorithms if name not in self.algorithms]
            if others:
                named = ", ".join(others)
                raise Refused(f"its policy does not allow {named}: {_see('algorithms')}")
        given = terms.privacy.unit if terms.privacy is not None else "nobody"
        if self.privacy is not None and given != self.privacy.unit:
            allowed = f"gives {self.privacy} at most, and the experiment protects {given}"
            raise Refused(f"its policy {allowed}: {_see('[privacy]')}")
        if terms.rounds > self.most_rounds:
            allowed = f"{self.most_rounds} rounds, not {terms.rounds}"
            raise Refused(f"its policy allows {allowed}: {_see('most_rounds')}")
        if not self.label_counts and "label_counts" in terms.algorithm.discloses:
            raise Refused(f"its policy does not allow to send label counts: {_see('label_counts')}")
        if not self.label_counts and terms.holds_out:
            raise Refused(
                "its policy does not allow tests on held-out examples, which can tell its label "
                f"counts: {_see('label_counts')}"
            )

    def check_held_out(self, count: int) -> None:
        if 0 < count < self.least_held_out:
            raise Refused(
                f"it would be tested on {count} examples, and its policy wants "
                f"{self.least_held_out} or more: {_see('least_held_out')}"
            )

    def check_update(self, norm: float) -> None:
        if self.largest_norm is not None and not norm <= self.largest_norm:
            raise Refused(f"its policy holds back updates longer than {self.largest_norm:g}")


def _see(key: str) -> str:
    return f"see {key} in its {FILE}"
