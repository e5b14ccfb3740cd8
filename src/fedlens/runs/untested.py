"""Clients that have nothing of their own to be tested on: how many they are is said."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable

from fedlens.setup import Setup

logger = logging.getLogger(__name__)


def say_who_is_untested(setups: Iterable[Setup]) -> None:
    """Before runs begin whose clients are tested one by one: a line, of equal ones once."""
    for line in dict.fromkeys(map(_untested, setups)):
        if line:
            logger.warning("%s", line)


def _untested(setup: Setup) -> str:
    if setup.client_tests is None:
        return ""
    part, held = setup.client_tests
    count, total = int((held.sizes == 0).sum()), len(held)
    if not count:
        return ""
    why, share = "", setup.experiment.clients.holdout
    if part == "train":
        why = f" (clients.holdout = {share:g} takes none of fewer than {math.ceil(1 / share)})"
    have = "has" if count == 1 else "have"
    return (
        f"{count:,} of {total:,} clients {have} no images of their own to be tested on{why}: "
        "accuracies by client leave them out"
    )
