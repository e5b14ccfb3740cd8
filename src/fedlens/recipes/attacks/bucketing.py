"""The tables of Karimireddy, He and Jaggi (ICLR 2022) without momentum, beside their raw logs."""

from __future__ import annotations

import math
import statistics
from typing import Any

import numpy as np

from fedlens.config.experiment import Clients, Evaluate, Experiment, LocalTraining, Named
from fedlens.recipes.page import beside, curves, note, published, told
from fedlens.recipes.recipe import Measured, Recipe, Results, Scale
from fedlens.report.blocks import Block
from fedlens.report.numbers import NONE
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


def cell(attack: str, before: str, defence: str) -> str:
    return f"{attack}, {before}, {defence}"


def bucketing(scale: Scale) -> Recipe:
    theirs = published(__name__)
    cells = {
        cell(attack, before, defence): _experiment(scale, attack, before, defence)
        for attack in (LONG_TAIL, *ATTACKS)
        for before, known in theirs[attack].items()
        for defence in known
    }
    return Recipe(
        *told(__name__, "bucketing"),
        blocks,
        cells=cells,
        seeds=range(scale.pick(1, 1, 3)),
        stand_in=scale.instead("mnist"),
    )


def _experiment(scale: Scale, attack: str, before: str, defence: str) -> Experiment:
    is_tail = attack == LONG_TAIL
    count = 24 if is_tail else HONEST + HOSTILE
    papers = defences(0 if is_tail else HOSTILE)[defence]
    if before == "bucketing":
        papers = (*papers, Named("bucketing", {"size": 2}))
    options: dict[str, Any] = {"tail": TAIL} if is_tail else {"mixed": HOSTILE}
    hostile = [*range(HONEST, count)]
    return Experiment(
        dataset=Named(scale.dataset("mnist")),
        model=Named(scale.pick("linear", "pfl-cnn", "pfl-cnn")),
        rounds=scale.pick(2, 300, 4500 if is_tail else 600),
        engine=scale.engine,
        clients=Clients(count=count, partition=Named("slices", options)),
        local=LocalTraining(steps=1, batch_size=32, lr=LR),
        evaluate=Evaluate(every=scale.pick(1, 30, 30)),
        algorithm=papers,
        attack=None if is_tail else Named(attack, {"clients": hostile, **ATTACKS[attack]}),
    )


def late(run: Run) -> float:
    """The mean test accuracy of the last evaluations."""
    return statistics.fmean(run.curve("test_accuracy")[1][-COUNTED:])


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
        score = on_tail if attack == LONG_TAIL else late
        rows = []
        for before, known in theirs[attack].items():
            for defence, number in known.items():
                runs = results.runs[cell(attack, before, defence)]
                ours = Measured.of([score(run) for run in runs]) if runs else None
                words = f"{defence}, s = 2" if before == "bucketing" else defence
                rows.append((words, number, ours or NONE))
        shown.append(beside(rows, title=f"{attack}: accuracy, %", of="defence", compared=compared))
        names = {
            cell(attack, before, defence): defence + ", s = 2" * (before == "bucketing")
            for before, known in theirs[attack].items()
            for defence in known
        }
        shown.append(curves(results, names, title=f"{attack}: test accuracy by round"))
    return [*shown, note(__name__, "What differs from the logs")]
