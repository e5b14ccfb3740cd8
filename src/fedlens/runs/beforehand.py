"""Warnings before runs begin: what is not tested, has no effect, or is done twice."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import nn

from fedlens.algorithm import same
from fedlens.config.experiment import Experiment
from fedlens.data.partitions import natural_column
from fedlens.setup import Setup
from fedlens.setup.algorithm import make_algorithm

logger = logging.getLogger(__name__)

MOST_NAMED = 5  # clients or classes in one line


def say_beforehand(setups: Iterable[Setup]) -> None:
    """Log the warnings of all runs, one line each and equal lines once."""
    about = _untested, _tested_alone, _untested_classes, _without_effect, _softmax_twice
    lines = [say(setup) for setup in setups for say in about]
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
    have, them = ("has", "its own") if count == 1 else ("have", "their own")
    return (
        f"{count:,} of {total:,} clients {have} no images of {them} to be tested on{why}: "
        f"accuracies by client leave {'it' if count == 1 else 'them'} out"
    )


def _tested_alone(setup: Setup) -> str:
    """A warning if test images have owners that do not train: accuracies by client omit them."""
    if setup.client_tests is None or setup.client_tests.part != "test":
        return ""
    held, test = setup.client_tests.holdings, setup.dataset.test
    count = len(test) - len(held.index)
    if not count:
        return ""
    named = setup.experiment.clients.partition
    column = natural_column(named.name, named.options)
    assert column is not None, "else no test examples are the clients' own"
    names = sorted({str(name) for name in test.columns[column]} - set(held.names or ()))
    return (
        f"{count:,} of {len(test):,} test images belong to nobody who trains "
        f"({column} {_first(names)}): "
        "they count in accuracy, and accuracies by client leave them out"
    )


def _untested_classes(setup: Setup) -> str:
    """A warning if classes of the training set have no test images, so are not measured."""
    if "test" not in setup.parts:
        return ""
    dataset = setup.dataset  # its labels stay where they were loaded, not on the engine's device
    trained, tested = (
        torch.bincount(examples.labels, minlength=dataset.num_classes) > 0
        for examples in (dataset.train, dataset.test)
    )
    names = [dataset.classes[k] for k in (trained & ~tested).nonzero().flatten().tolist()]
    if not names:
        return ""
    have = "has" if len(names) == 1 else "have"
    return (
        f"{len(names):,} of {dataset.num_classes:,} classes {have} no test images "
        f"({_first(names)}): accuracy and macro F1 say nothing of how the model does there"
    )


def _first(names: Sequence[str]) -> str:
    return ", ".join([*names[:MOST_NAMED], *["..."] * (len(names) > MOST_NAMED)])


def _without_effect(setup: Setup) -> str:
    return epochs_without_effect(setup.experiment)


def epochs_without_effect(experiment: Experiment) -> str:
    """A warning if local.epochs does not change what the algorithm draws."""
    local = experiment.local
    if local.epochs == 1 or local.steps is not None:
        return ""
    plain = replace(experiment, local=replace(local, epochs=1))
    try:
        if not same(make_algorithm(plain).draw, make_algorithm(experiment).draw):
            return ""
    except ValueError:  # the algorithm refuses one epoch
        return ""
    names = " + ".join(named.name for named in experiment.algorithm)
    return f"local.epochs is {local.epochs}, which has no effect: {names} has its own local work"


def _softmax_twice(setup: Setup) -> str:
    """A warning if the model ends in a softmax and the loss expects logits."""
    *_, last = setup.network.module.modules()
    if not isinstance(last, nn.Softmax) or setup.experiment.loss.name != "cross_entropy":
        return ""
    return (
        "the model ends in Softmax, and the loss cross_entropy has one of its own, which slows "
        "learning and may end it: leave out the model's"
    )
