"""FedAvg, section 5.2: iid and non-iid clients over 80 rounds."""

from __future__ import annotations

import math

from fedlens.recipes.ghaemi.outcome import reached
from fedlens.recipes.ghaemi.setting import (
    AS_PUBLISHED,
    FORMS,
    OURS,
    SPLITS,
    dead_runs,
    double_softmax_note,
    experiment,
    late_published,
    living,
    over_published,
    published,
)
from fedlens.recipes.page import beside
from fedlens.recipes.recipe import Measured, Recipe, Results, Scale
from fedlens.report.blocks import Block, Table
from fedlens.report.numbers import NONE

FLOOR = math.log(1 + 9 / math.e)  # the smallest loss of the double softmax with ten classes
TOO_FAST = "non-iid, logits, lr 0.05"


def fedavg(scale: Scale) -> Recipe:
    cells = {
        f"{split}, {form}": experiment(scale, split, **how)
        for split in SPLITS
        for form, how in FORMS.items()
    }
    cells[TOO_FAST] = experiment(scale, "non-iid", loss="cross_entropy", lr=0.05)
    return Recipe(
        title="FedAvg on Fashion-MNIST",
        about="The report trains a CNN on 100 clients, ten a round, once with iid clients and once "
        "with two classes a client. Here are its curves with ours over them: in its form, which "
        "has a softmax too many, and with plain logits.",
        cells=cells,
        seeds=range(scale.pick(1, 1, 3)),
        blocks=blocks,
        stand_in=scale.instead("fashion-mnist"),
    )


def blocks(results: Results) -> list[Block]:
    alive = living(results)
    rows: list[tuple[str, float | None, Measured | str]] = [
        (
            f"{split}, {form}",
            late_published("FedAvg", split) if form == AS_PUBLISHED else None,
            alive.late(f"{split}, {form}"),
        )
        for split in SPLITS
        for form in FORMS
    ]
    rows.append((TOO_FAST, None, reached(results, TOO_FAST)))
    return [
        beside(
            rows,
            title="Test accuracy over the last quarter of the rounds, %",
            caption="The mean over the last quarter of the rounds (61 to 80 in the report): with "
            "two classes a client a single round says little. Runs that ended dead are left out.",
            of="clients, network",
        ),
        dead_runs(results, [f"{split}, {AS_PUBLISHED}" for split in SPLITS]),
        *over_published(
            alive,
            "FedAvg",
            {
                "iid": {"iid, double softmax": AS_PUBLISHED, "iid, logits": OURS},
                "non-iid": {
                    "non-iid, double softmax": AS_PUBLISHED,
                    "non-iid, logits": OURS,
                    TOO_FAST: f"{OURS}, lr 0.05",
                },
            },
        ),
        identity(results),
        double_softmax_note(),
    ]


def identity(results: Results) -> Table:
    """The distance of the loss from the value that a double softmax gives for the accuracy."""
    rows: list[list[str | float | None]] = []
    for split in SPLITS:
        theirs = published("FedAvg", split)
        runs = results.runs[f"{split}, {AS_PUBLISHED}"]
        losses, accuracies = (
            [y for run in runs for y in _late(run.curve(m)[1])]
            for m in ("test_loss", "test_accuracy")
        )
        rows.append(
            [
                split,
                _distance(theirs["test_loss"][20:], theirs["test_acc"][20:]),
                _distance(losses, accuracies),
            ]
        )
    return Table(
        title="Is the loss 1.4612 + (1 − accuracy)?",
        caption="The mean distance of the test loss from 1.4612 + 1 − accuracy, after the first "
        "quarter of the rounds (from round 21 on in the report). It is near 0 where a double "
        "softmax is saturated.",
        header=("clients", "published", "ours"),
        rows=rows,
        published=frozenset({1}),
    )


def _late(values: list[float]) -> list[float]:
    return values[len(values) // 4 :]


def _distance(
    losses: list[float | None] | list[float], accuracies: list[float | None] | list[float]
) -> str:
    apart = [
        abs(loss - FLOOR - 1 + accuracy)
        for loss, accuracy in zip(losses, accuracies, strict=True)
        if loss is not None and accuracy is not None
    ]
    return f"{sum(apart) / len(apart):.4f}" if apart else NONE
