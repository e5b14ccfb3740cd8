"""The settings that the pilot of Figure 4 picked, read from chosen.json beside this file."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

CHOSEN = "chosen.json"
CENTRALISED = "centralised"  # the key of its choice for centralised training


class Point(NamedTuple):
    """A point of the grid: the clients' learning rate and the server's momentum."""

    lr: float
    momentum: float


class Rate(NamedTuple):
    """The learning rate of centralised training, and its schedule: constant, or cosine to 0."""

    lr: float
    schedule: str = "constant"


@cache
def _chosen() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads(
        (files("fedlens.recipes.hsu2020") / CHOSEN).read_text(encoding="utf-8")
    )
    return found


def chosen(dataset: str, alpha: float, base: str) -> Point | None:
    """The pilot's choice for a data set, a concentration and FedAvg or FedAvgM."""
    found = _chosen().get(dataset, {}).get(f"{alpha:g}", {}).get(base)
    return Point(*found) if found else None


def chosen_rate(dataset: str) -> Rate | None:
    """The pilot's choice for centralised training."""
    found = _chosen().get(dataset, {}).get(CENTRALISED)
    return Rate(*found) if found else None
