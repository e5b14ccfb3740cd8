"""The outcomes of clients that are asked to train: which report, when, and why others do not.

All outcomes follow from keys and the virtual clock before any client trains, so a client that will
fail need not train. They are the same on every engine, and after a resume.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fedlens import keys
from fedlens.names import REPORTED
from fedlens.reporting.devices import Devices

FAULT, MOMENT = keys.purpose("fault"), keys.purpose("moment")
PAUSE = 60.0  # virtual seconds before clients are asked again, if too few reported


@dataclass(frozen=True)
class Faults:
    """The probability of each fault, for every client that is asked, in every round."""

    absent: float = 0.0  # it never starts
    dropped: float = 0.0  # it stops at a random moment before it reports
    nan: float = 0.0  # it sends an update with NaNs
    infinite: float = 0.0  # with infinite numbers
    huge: float = 0.0  # of an absurd length
    malformed: float = 0.0  # of wrong shapes

    def __post_init__(self) -> None:
        chances = {f.name: getattr(self, f.name) for f in fields(self)}
        for name, chance in chances.items():
            if not 0 <= chance <= 1:
                raise ValueError(f"faults.{name} is {chance}: choose a chance from 0 to 1")
        if sum(chances.values()) > 1:
            raise ValueError(
                f"faults have chances of {sum(chances.values()):g} together: choose 1 or less"
            )

    def drawn(self, client_keys: Tensor) -> list[str]:  # [C]
        """Draw the fault of each client, or REPORTED for none."""
        names = [f.name for f in fields(self)]
        chances = torch.tensor([getattr(self, name) for name in names], dtype=torch.float64)
        draws = keys.uniform(keys.fold(client_keys, FAULT))
        places = torch.searchsorted(chances.cumsum(0), draws, right=True)
        return [[*names, REPORTED][place] for place in places.tolist()]


REJECTED = ("nan", "infinite", "huge", "malformed", "stale", "foreign")
"""The outcomes of updates that arrive and are rejected."""


@dataclass(frozen=True)
class Reporting:
    """The server's rules for a round, after Bonawitz et al. (MLSys 2019, arXiv:1902.01046)."""

    over_select: float = 1.0  # how many times clients.per_round to ask; the first reports are used
    deadline: float | None = None  # seconds after which the server stops waiting
    quorum: float = 0.0  # the share of clients.per_round that must report; at least one client
    below_quorum: Literal["repeat", "stop"] = "repeat"  # the round with other clients; the run
    largest: float | None = None  # the largest norm of an accepted update; None: any finite norm

    def __post_init__(self) -> None:
        for name, fits, remedy in (
            ("over_select", 1 <= self.over_select < math.inf, "choose 1 or more"),
            ("deadline", self.deadline is None or self.deadline > 0, "choose more than 0 seconds"),
            ("quorum", 0 <= self.quorum <= 1, "choose a share from 0 to 1"),
            ("largest", self.largest is None or self.largest > 0, "choose a norm above 0"),
        ):
            if not fits:
                raise ValueError(f"reporting.{name} is {getattr(self, name)}: {remedy}")

    def needed(self, goal: int, fewest: int) -> int:
        """How many of `goal` clients must report, if combining needs at least `fewest` updates."""
        return max(math.ceil(self.quorum * goal - 1e-9), fewest, 1)

    def rejects(self, norm: float) -> str | None:
        """The reason to reject an update of this norm, or None."""
        if math.isnan(norm):
            return "nan"
        if math.isinf(norm):
            return "infinite"
        return "huge" if self.largest is not None and norm > self.largest else None


class End(NamedTuple):
    """The outcome of a client that was asked, and its time."""

    outcome: str
    time: float


@dataclass(frozen=True)
class Clock:
    """Devices and faults of clients on a virtual clock, and how long the server waits for them."""

    devices: Devices
    faults: Faults = Faults()
    reporting: Reporting = Reporting()
    bytes_up: int = 0  # that a client sends
    bytes_down: int = 0  # that a client receives

    def ends(
        self, clients: Tensor, client_keys: Tensor, examples: Tensor, time: float
    ) -> list[End]:  # [C]
        """The outcomes of clients that are asked at `time` to process this many examples."""
        devices, deadline = self.devices, self.reporting.deadline
        seconds = devices.seconds(clients, client_keys, examples, self.bytes_up, self.bytes_down)
        moments = keys.uniform(keys.fold(client_keys, MOMENT))
        there = devices.there_until(clients, time)
        last = math.inf if deadline is None else time + deadline
        found = []
        for outcome, takes, moment, until in zip(
            self.faults.drawn(client_keys),
            seconds.tolist(),
            moments.tolist(),
            there.tolist(),
            strict=True,
        ):
            if until <= time:
                found.append(End("unavailable", time))
                continue
            lasts = {"absent": 0.0, "dropped": moment}.get(outcome, 1.0)
            end = time + lasts * takes
            if end > until:
                outcome, end = "dropped", until
            found.append(End("late", last) if end > last else End(outcome, end))
        return found

    def first(self, ends: list[End], goal: int, time: float) -> tuple[list[str], float]:
        """The outcomes of clients asked at `time` once the first `goal` have reported, and when.

        If fewer report, the server waits for the deadline or, if there is none, for the last.
        """
        outcomes = [end.outcome for end in ends]
        reported = [row for row, end in enumerate(ends) if end.outcome == REPORTED]
        taken = sorted(reported, key=lambda row: ends[row].time)[:goal]  # if equal, the first row
        if len(taken) == goal:
            closes = ends[taken[-1]].time
            for row in set(range(len(ends))) - set(taken):
                if outcomes[row] == REPORTED or ends[row].time > closes:
                    outcomes[row] = "surplus"  # whatever its outcome would have been
            return outcomes, closes
        if self.reporting.deadline is not None:
            return outcomes, time + self.reporting.deadline
        return outcomes, max((end.time for end in ends), default=time)
