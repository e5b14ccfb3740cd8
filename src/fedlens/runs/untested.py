"""Clients that have nothing of their own to be tested on, and classes: how many is said."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable

import torch

from fedlens.setup import Setup

logger = logging.getLogger(__name__)

MOST_NAMED = 5  # classes in one line


def say_who_is_untested(setups: Iterable[Setup]) -> None:
    """Before runs begin: a line about clients and one about classes, of equal ones once."""
    lines = [line for setup in setups for line in (_untested(setup), _untested_classes(setup))]
    for line in dict.fromkeys(lines):
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
    have, them = ("has", "its own") if count == 1 else ("have", "their own")
    return (
        f"{count:,} of {total:,} clients {have} no images of {them} to be tested on{why}: "
        f"accuracies by client leave {'it' if count == 1 else 'them'} out"
    )


def _untested_classes(setup: Setup) -> str:
    """Of those that are trained on: no measure says how the model does on the others."""
    if "test" not in setup.parts:
        return ""
    dataset = setup.dataset
    trained, tested = (
        torch.bincount(examples.labels, minlength=dataset.num_classes) > 0
        for examples in (dataset.train, setup.parts["test"])
    )
    names = [dataset.classes[k] for k in (trained & ~tested).nonzero().flatten().tolist()]
    if not names:
        return ""
    more = ", ..." if len(names) > MOST_NAMED else ""
    which = ", ".join(names[:MOST_NAMED]) + more
    have = "has" if len(names) == 1 else "have"
    return (
        f"{len(names):,} of {dataset.num_classes:,} classes {have} no test images ({which}): "
        "accuracy and macro F1 say nothing of how the model does there"
    )
