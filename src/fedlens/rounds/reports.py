"""The outcomes of clients that are asked to train: which report, when, and why others do not.

All outcomes follow from keys and the virtual clock before any client trains, so a client that will
fail need not train. They are the same on every engine, and after a resume.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
from torch import Tensor

from fedlens.config.names import REPORTED
from fedlens.config.sections import Faults as Faults
from fedlens.config.sections import Reporting as Reporting
from fedlens.core import keys
from fedlens.rounds.devices import Devices

FAULT, MOMENT = keys.purpose("fault"), keys.purpose("moment")
PAUSE = 60.0  # virtual seconds before clients are asked again, if too few reported


def drawn(faults: Faults, client_keys: Tensor) -> list[str]:  # [C]
    """The fault of each client, or REPORTED for none."""
    names = [f.name for f in fields(faults)]
    chances = torch.tensor([getattr(faults, name) for name in names], dtype=torch.float64)
    draws = keys.uniform(keys.fold(client_keys, FAULT))
    places = torch.searchsorted(chances.cumsum(0), draws, right=True)
    return [[*names, REPORTED][place] for place in places.tolist()]


REJECTED = ("nan", "infinite", "huge", "malformed", "stale", "foreign")
"""The outcomes of updates that arrive and are rejected."""


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
            drawn(self.faults, client_keys),
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
