"""LIADMM, section 5.4: as its equations have it, and as its figures suggest that it was run."""

from __future__ import annotations

from typing import Any

from fedlens.config.experiment import Named
from fedlens.recipes.ghaemi.outcome import reached
from fedlens.recipes.ghaemi.setting import (
    AS_PUBLISHED,
    FORMS,
    OURS,
    SPLITS,
    Split,
    double_softmax_note,
    experiment,
    late_published,
    over_published,
)
from fedlens.recipes.page import beside, curves
from fedlens.recipes.recipe import Recipe, Results, Scale
from fedlens.report.blocks import Block, Text

LITERAL = "equations 4.4 to 4.6"
TEN_EPOCHS = "ten epochs, "  # common to all other readings, so legends omit it
READINGS: dict[str, dict[str, Any]] = {
    LITERAL: {},
    "ten epochs, dual once": {"local": "training"},
    "ten epochs, dual every step": {"local": "training", "dual": "step"},
    "ten epochs, dual every step, sampled": {
        "local": "training",
        "dual": "step",
        "average": "sampled",
    },
}
"""What the report may have run: it states that gamma = lr, and that the rest is as for FedAvg."""

NAMED = {AS_PUBLISHED: "", OURS: f", {OURS}"}  # suffixes of a reading's name, by form

ONE_STEP: dict[str, Any] = {"epochs": 1, "momentum": 0.0}
"""The local step in the equations: one full-batch step of length gamma, without momentum."""


def liadmm(scale: Scale) -> Recipe:
    readings = dict(list(READINGS.items())[: scale.pick(3, 4, 4)])
    cells = {
        f"{split}, {name}{NAMED[form]}": experiment(
            scale,
            split,
            Named("liadmm", {"gamma": how["lr"], **options}),
            **how,
            **(ONE_STEP if name == LITERAL else {}),
        )
        for form, how in FORMS.items()
        for split in SPLITS
        for name, options in readings.items()
    }
    return Recipe(
        title="LIADMM on Fashion-MNIST",
        about="The report's LIADMM learns slowly with iid clients and fails completely with two "
        "classes a client; it leaves open why. Its notebook is public, but we could not obtain it. "
        "Here are the equations as printed, one full-batch step a round, and three readings in "
        "which ten epochs of SGD with momentum 0.9 take the place of that step; each in the "
        "report's form, which has a softmax too many, and with plain logits.",
        cells=cells,
        seeds=range(scale.pick(1, 1, 3)),
        blocks=blocks,
        stand_in=scale.instead("fashion-mnist"),
    )


def blocks(results: Results) -> list[Block]:
    cells = {form: {split: _readings(results, split, form) for split in SPLITS} for form in FORMS}
    rows = [
        (
            cell,
            late_published("LIADMM", split) if form == AS_PUBLISHED else None,
            reached(results, cell),
        )
        for form, by_split in cells.items()
        for split, named in by_split.items()
        for cell in named
    ]
    return [
        beside(
            rows,
            title="Test accuracy over the last quarter of the rounds, %",
            caption="The mean over the last quarter of the rounds (61 to 80 in the report); of "
            "runs that diverged, when they did. Those without logits have the double softmax.",
            of="clients, reading",
        ),
        *over_published(results, "LIADMM", cells[AS_PUBLISHED], "the report"),
        *(
            curves(
                results,
                named,
                title=f"LIADMM, {split}, {OURS}: test accuracy",
                caption="The same readings with plain logits and a rate of 0.01: the test accuracy "
                "of the server's model after each round.",
                y_label="test accuracy",
            )
            for split, named in cells[OURS].items()
            if named
        ),
        Text(
            title="What the failure looks like",
            paragraphs=(
                "The failed curve of the report is flat at an accuracy of 0.100 and a loss of "
                "2.3612. That is not ln 10 = 2.3026, the loss of a net that knows nothing: it is "
                "0.1 × 1.4612 + 0.9 × 2.4612, the loss of a net that is sure, for every image, of "
                "one and the same class. It ran away, and the double softmax gives no gradient "
                "back.",
                "The equations are not to blame: with all clients in every round they are "
                "optimistic gradient descent, which is stable while gamma times the curvature is "
                "below 2/3. `fedlens reproduce ghaemi/why-liadmm-fails` takes the possible causes "
                "one by one, and `ghaemi/fedadmm` has a form that works with plain "
                "logits. The report's plots call LIADMM “FedADMM”.",
            ),
        ),
        double_softmax_note(),
    ]


def _readings(results: Results, split: Split, form: str) -> dict[str, str]:
    """The names of lines by cell, for the cells of a split and a form that were run."""
    cells = {f"{split}, {name}{NAMED[form]}": name.removeprefix(TEN_EPOCHS) for name in READINGS}
    return {cell: name for cell, name in cells.items() if cell in results.runs}
