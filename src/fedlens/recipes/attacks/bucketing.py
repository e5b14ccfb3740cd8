"""The tables of Karimireddy, He and Jaggi (ICLR 2022) without momentum, beside their raw logs."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np

from fedlens.config.experiment import Clients, Evaluate, Experiment, LocalTraining, Named
from fedlens.recipes.page import beside, curves, note, published, recipe
from fedlens.recipes.recipe import Measured, Recipe, Results, Scale, late
from fedlens.report.blocks import Block
from fedlens.runs.records import Run

LR = 0.01
HOSTILE, HONEST = 5, 20
ATTACKS = {
    "mimic": {},
    "sign-flip": {},
    "label-flip": {},
    "ipm": {"epsilon": 0.1},
    "alie": {},
}
LONG_TAIL, TAIL = "long-tail", 0.5
COUNTED = 5  # evaluations at the end


def defences(hostile: int) -> dict[str, tuple[Named, ...]]:
    return {
        "mean": (),
        "krum": (Named("krum", {"byzantine": hostile}),),
        "median": (Named("median"),),
        "geometric-median": (Named("geometric-median", {"iterations": 8}),),
        # 10 for gradients: updates are lr times as long.
        "centred-clipping": (Named("centred-clipping", {"radius": 10 * LR, "iterations": 3}),),
    }


def bucketing(scale: Scale) -> Recipe:
    cells = {
        f"{attack}, {before}, {defence}": _experiment(scale, attack, before, defence)
        for attack in (LONG_TAIL, *ATTACKS)
        for before, known in published(__name__)[attack].items()
        for defence in known
    }
    return recipe(__name__, scale, "bucketing", blocks, cells=cells, on=["mnist"])


def _experiment(scale: Scale, attack: str, before: str, defence: str) -> Experiment:
    is_tail = attack == LONG_TAIL
    count = 24 if is_tail else HONEST + HOSTILE
    papers = defences(0 if is_tail else HOSTILE)[defence]
    if before == "bucketing":
        papers = (*papers, Named("bucketing", {"size": 2}))
    options: dict[str, Any] = {"tail": TAIL} if is_tail else {"mixed": HOSTILE}
    hostile = [*range(HONEST, count)]
    return scale.experiment(
        "mnist",
        ("linear", "pfl-cnn", "pfl-cnn"),
        (2, 300, 4500 if is_tail else 600),
        clients=Clients(count=count, partition=Named("slices", options)),
        local=LocalTraining(steps=1, batch_size=32, lr=LR),
        evaluate=Evaluate(every=scale.pick(1, 30, 30)),
        algorithm=papers,
        attack=None if is_tail else Named(attack, {"clients": hostile, **ATTACKS[attack]}),
    )


def on_tail(run: Run) -> float | None:
    """The last accuracy on test images with a tail as long as that of the training images."""
    found = run.evaluation.get("confusion")
    if not isinstance(found, list):
        return None
    table = np.array(found, float)  # [L, L + 1]
    shares = TAIL ** np.arange(len(table))
    held = table.sum(1)
    right = table.diagonal()
    return float((shares * right).sum() / (shares * held).sum()) if held.any() else math.nan


def blocks(results: Results) -> list[Block]:
    theirs = published(__name__)
    compared = results.scale.dataset("mnist") == "mnist"
    shown: list[Block] = []
    for attack in (LONG_TAIL, *ATTACKS):
        score = on_tail if attack == LONG_TAIL else partial(late, count=COUNTED)
        rows, names = [], {}
        for before, known in theirs[attack].items():
            for defence, number in known.items():
                cell = f"{attack}, {before}, {defence}"
                names[cell] = defence + ", s = 2" * (before == "bucketing")
                ours = Measured.of([score(run) for run in results.runs[cell]])
                rows.append((names[cell], number, ours))
        shown.append(beside(rows, title=f"{attack}: accuracy, %", of="defence", compared=compared))
        shown.append(curves(results, names, title=f"{attack}: test accuracy by round"))
    return [*shown, note(__name__, "What differs from the logs")]
