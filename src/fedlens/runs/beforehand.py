"""What is said of runs before they begin: clients that are not tested, and keys without effect."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from dataclasses import replace

from fedlens.algorithm import same
from fedlens.setup import Setup
from fedlens.setup.algorithm import make_algorithm

logger = logging.getLogger(__name__)


def say_beforehand(setups: Iterable[Setup]) -> None:
    """What users should know before runs begin: a line each, of equal ones once."""
    lines = [line for setup in setups for line in (_untested(setup), _without_effect(setup))]
    for line in dict.fromkeys(filter(None, lines)):
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


def _without_effect(setup: Setup) -> str:
    """Of local.epochs, where the algorithm draws the same without it."""
    experiment, local = setup.experiment, setup.experiment.local
    if local.epochs == 1 or local.steps is not None:
        return ""
    plain = replace(experiment, local=replace(local, epochs=1))
    try:
        if not same(make_algorithm(plain).draw, make_algorithm(experiment).draw):
            return ""
    except ValueError:  # it needs other epochs than one
        return ""
    names = " + ".join(named.name for named in experiment.algorithm)
    return f"local.epochs is {local.epochs}, which has no effect: {names} has its own local work"
