"""The report's section 5: centralised training, FedAvg, FedProx and LIADMM; and FedADMM."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from importlib.resources import files
from statistics import fmean
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from fedlens.config.experiment import Clients, Evaluate, Experiment, LocalTraining, Named
from fedlens.recipes import page
from fedlens.recipes import samples as of
from fedlens.recipes.page import bars, beside, curves, mean_of, note
from fedlens.recipes.recipe import Measured, Recipe, Results, Scale
from fedlens.report.blocks import Block, Table
from fedlens.report.numbers import NONE
from fedlens.runs.records import Run

Split = Literal["iid", "non-iid"]
SPLITS: tuple[Split, ...] = ("iid", "non-iid")
PARTITION = {"iid": Named("iid"), "non-iid": Named("classes", {"per_client": 2})}

AS_PUBLISHED = "double softmax"
OURS = "logits"
FORMS: dict[str, dict[str, Any]] = {
    AS_PUBLISHED: {"loss": "double_softmax", "lr": 0.05},
    OURS: {"loss": "cross_entropy", "lr": 0.01},
}
"""How the network ends: as published in a softmax, which the loss applies again, or in logits."""
DOUBLE_SOFTMAX = note(__name__, "The network ended in a softmax, and the loss had another")


class Trial(NamedTuple):
    """What a cell is about, what curves call it, and how it is run."""

    split: Split
    form: str
    line: str
    how: Mapping[str, Any] = MappingProxyType({})  # for `experiment`, besides its form
    is_theirs: bool = False  # whether the report has a curve of it


Trials = Mapping[str, Trial]
"""Trials by cell."""


def experiment(
    scale: Scale,
    split: Split,
    algorithm: Named | None = None,
    *,
    loss: str = "double_softmax",
    lr: float = 0.05,
    momentum: float = 0.9,
    epochs: int | None = None,
) -> Experiment:
    """The report's setting: 10 of 100 clients per round, ten epochs, batches of 128, 80 rounds."""
    count, per_round = scale.pick((20, 2), (100, 10), (100, 10))
    return scale.experiment(
        "fashion-mnist",
        ("linear", "lenet5", Named("mcmahan-cnn", {"geometry": "paper4"})),
        (2, 20, 80),
        loss=loss,
        clients=Clients(count=count, per_round=per_round, partition=PARTITION[split]),
        local=LocalTraining(
            epochs=epochs or scale.pick(1, 5, 10),
            batch_size=scale.pick(64, 128, 128),
            lr=lr,
            momentum=momentum,
        ),
        evaluate=Evaluate(on=("test", "train") if scale.name == "paper" else ("test",)),
        algorithm=(algorithm,) if algorithm else (),
    )


recipe = partial(page.recipe, __name__, on=("fashion-mnist",))


def study(
    scale: Scale,
    item: str,
    trials: Trials,
    blocks: Callable[[Results, Trials], list[Block]],
    **more: Any,
) -> Recipe:
    """The recipe of an item from its trials; `blocks` gets those that were run."""

    def shown(results: Results) -> list[Block]:
        return blocks(results, {cell: one for cell, one in trials.items() if results.runs[cell]})

    cells = {
        cell: experiment(scale, one.split, **{**FORMS[one.form], **one.how})
        for cell, one in trials.items()
    }
    return recipe(scale, item, shown, cells=cells, **more)


def published(algorithm: str, split: Split) -> dict[str, list[float | None]]:
    """The report's curves, read from its figures to within 0.005: train and test, loss and acc."""
    file = files("fedlens.recipes.ghaemi") / "curves.json"
    curves: dict[str, dict[str, list[float | None]]] = json.loads(file.read_text(encoding="utf-8"))
    return curves[f"{algorithm} {split.replace('-', '')}"]


def over_published(
    results: Results, algorithm: str, trials: Trials, theirs: str = AS_PUBLISHED
) -> list[Block]:
    """Accuracy and loss by round, for each split, together with the curves of the report.

    The report's curve is named `theirs`, and has the colour of our line with that name, if there
    is one.
    """
    measures = {"test_acc": "test_accuracy", "test_loss": "test_loss"}
    if results.scale.name == "paper":
        measures |= {"train_acc": "train_accuracy", "train_loss": "train_set_loss"}
    rounds = max(run.num_rounds for run in results.all)
    blocks: list[Block] = []
    for split, (measure, ours) in itertools.product(SPLITS, measures.items()):
        what = measure.replace("_", " ").replace("acc", "accuracy")
        shown = {
            cell: one.line
            for cell, one in trials.items()  # the two kinds of loss cannot share an axis
            if one.split == split and not ("loss" in measure and one.form == OURS)
        }
        blocks.append(
            curves(
                results,
                shown,
                ours,
                title=f"{algorithm}, {split}: {what}",
                published={theirs: published(algorithm, split)[measure][:rounds]},
                y_label=what,
            )
        )
    return blocks


def late(results: Results, algorithm: str, trials: Trials, of: str) -> Table:
    """Accuracy over the last quarter of the rounds, beside that of a curve of the report."""
    rows = []
    for cell, one in trials.items():
        theirs = published(algorithm, one.split)["test_acc"][60:] if one.is_theirs else []
        known = [value for value in theirs if value is not None]
        rows.append((cell, sum(known) / len(known) if known else None, reached(results, cell)))
    return beside(rows, title="Test accuracy over the last quarter of the rounds, %", of=of)


def living(results: Results) -> Results:
    """The runs without dead ones (`is_dead`); if all runs of a cell are dead, they are kept."""
    kept = {
        cell: [run for run in runs if not is_dead(run)] or runs
        for cell, runs in results.runs.items()
    }
    return replace(results, runs=kept)


def is_dead(run: Run) -> bool:
    """Whether a run predicted one class for all test images in the last quarter of evaluations."""
    predicted = run.curve("test_classes_predicted")[1]
    late = predicted[-max(len(predicted) // 4, 1) :]
    return run.status == "finished" and bool(late) and all(count == 1 for count in late)


def dead_runs(results: Results, cells: Iterable[str]) -> Table:
    """A table of how many runs of each cell ended dead, and the accuracy of the others."""
    rows: list[list[str | float | None]] = []
    for cell in cells:
        runs = results.runs[cell]
        dead = [run.experiment["seed"] for run in runs if is_dead(run)]
        alive = living(replace(results, runs={cell: runs})).late(cell)
        ends = f"{100 * alive.mean:.2f}" if len(dead) < len(runs) else NONE
        seeds = ", ".join(map(str, dead)) or NONE
        rows.append([cell, f"{len(dead)} of {len(runs)}", seeds, ends])
    return Table(
        title="Runs that ended dead",
        header=("clients, network", "dead", "their seeds", "the others"),
        rows=rows,
    )


def _saturated(trials: Trials) -> list[str]:
    """The cells with a double softmax, whose runs may end dead."""
    return [cell for cell, one in trials.items() if one.form == AS_PUBLISHED]


KNOWS_NOTHING = math.log(10)  # the loss of a network that finds all classes equally likely


def reached(results: Results, cell: str) -> Measured | str:
    """The accuracy of a cell over its last quarter; its `outcome` as text if runs diverged."""
    return results.late(cell) if results.diverged(cell) is None else outcome(results, cell)


def outcome(results: Results, cell: str) -> str:
    """A text: the accuracy of a cell's successful runs, and how many failed in which way."""
    runs = results.runs[cell]
    if not runs:
        return NONE
    alive = [run for run in runs if not _has_failed(run)]
    sure = sum(run.status != "diverged" and _is_sure_of_one(run) for run in runs)
    words = []
    if alive:
        words.append(mean_of(replace(results, runs={cell: alive}).late(cell), 1))
    if sure:
        words.append(f"one class for all ({sure} of {len(runs)})")
    if ended := results.when_diverged(cell):
        words.append(ended)
    return ", ".join(words)


def failed(results: Results, cell: str) -> bool:
    """Whether a run diverged, or ended with one class for all images."""
    return any(map(_has_failed, results.runs[cell]))


def _has_failed(run: Run) -> bool:
    return run.status == "diverged" or _is_sure_of_one(run)


def _is_sure_of_one(run: Run) -> bool:
    """Whether it ended with one class for all images and a loss above ln 10, that of guessing."""
    loss = run.final("test_loss") or math.inf
    return bool(run.summary["collapsed"]) and loss > KNOWS_NOTHING + 0.01


def samples(scale: Scale) -> Recipe:
    """Figure 1: a sample of each class of Fashion-MNIST."""
    sizes = {"training images": 60_000, "test images": 10_000, "classes": 10}
    return of.samples(__name__, scale, "fashion-mnist", 5, sizes)


PUBLISHED = page.published(__name__)


def centralised(scale: Scale) -> Recipe:
    """Centralised training, section 5.1: ten epochs of one client that holds everything."""
    cells = {}
    for form, how in FORMS.items():
        alone = experiment(scale, "iid", **how)
        cells[form] = replace(
            alone,
            rounds=scale.pick(2, 5, 10),
            clients=Clients(count=1),
            # A round is an epoch, and the momentum is never reset.
            local=replace(alone.local, epochs=1, reset=False),
            evaluate=Evaluate(on=("test", "train")),
        )
    return recipe(scale, "centralised", _centralised, cells=cells)


def _centralised(results: Results) -> list[Block]:
    rows = [
        (f"{name.replace('_', ' ')}, {form}", theirs if form == AS_PUBLISHED else None, found)
        for form in FORMS
        for name, theirs in PUBLISHED["at-the-end"].items()
        if (found := results.final(form, name)) or theirs
    ]
    trained = results.runs[AS_PUBLISHED]
    losses = [
        (
            f"{when} epoch",
            PUBLISHED["train_loss"][place],
            Measured.of([run.rounds[place]["train_loss"] for run in trained]),
        )
        for when, place in (("first", 0), ("last", -1))
    ]
    classes: list[str] = results.all[0].manifest["classes"]
    counts = [run.evaluation["confusion"] for run in trained]
    recall = [
        (name, theirs, Measured.of([table[label][label] / sum(table[label]) for table in counts]))
        for label, (name, theirs) in enumerate(zip(classes, PUBLISHED["recall"], strict=True))
    ]
    return [
        beside(rows, title="After the last epoch, %", of="measure, network"),
        beside(losses, title="Loss while training, double softmax", percent=False, digits=3),
        beside(recall, title="Recall by class, double softmax, %", of="class"),
        curves(results, title="Test accuracy by epoch", x_label="epoch"),
        note(__name__, "Text and figures disagree"),
        DOUBLE_SOFTMAX,
    ]


FLOOR = math.log(1 + 9 / math.e)  # the smallest loss of the double softmax with ten classes


def fedavg(scale: Scale) -> Recipe:
    """FedAvg, section 5.2: iid and non-iid clients over 80 rounds."""
    trials = {
        f"{split}, {form}": Trial(split, form, form, is_theirs=form == AS_PUBLISHED)
        for split in SPLITS
        for form in FORMS
    }
    fast = f"{OURS}, lr 0.05"
    trials[f"non-iid, {fast}"] = Trial("non-iid", OURS, fast, {"lr": 0.05})
    return study(scale, "fedavg", trials, _fedavg)


def _fedavg(results: Results, trials: Trials) -> list[Block]:
    alive = living(results)
    return [
        late(alive, "FedAvg", trials, "clients, network"),
        dead_runs(results, _saturated(trials)),
        *over_published(alive, "FedAvg", trials),
        train_and_test(alive),
        identity(results),
        DOUBLE_SOFTMAX,
    ]


def train_and_test(results: Results) -> Table:
    """Accuracy on all training images and on the test images, over the last ten evaluations."""
    rows = []
    for cell, runs in results.runs.items():
        both = [
            [fmean(run.curve(f"{part}_accuracy")[1][-10:]) for part in ("train", "test")]
            for run in runs
            if run.status == "finished" and run.has("train_accuracy")
        ]
        if both:
            train, test = zip(*both, strict=True)
            gap = Measured.of([a - b for a, b in both])
            found = (Measured.of(train), Measured.of(test), gap)
            theirs = _published_gap(cell)
            rows.append([cell, *map(mean_of, found), str(len(both)), theirs])
    return Table(
        title="Train against test accuracy, %",
        header=("clients, network", "train", "test", "train − test", "n", "published"),
        rows=rows,
        published=frozenset({5}),
    )


def _published_gap(cell: str) -> str:
    """The report's train minus test accuracy over its last ten rounds, in points."""
    for split in SPLITS:
        if cell == f"{split}, {AS_PUBLISHED}":
            curves = published("FedAvg", split)
            late = zip(*(curves[f"{part}_acc"][-10:] for part in ("train", "test")), strict=True)
            return f"{100 * fmean(a - b for a, b in late if a is not None and b is not None):.2f}"
    return NONE


def identity(results: Results) -> Table:
    """The distance of the loss from the value that a double softmax gives for the accuracy."""
    rows: list[list[str]] = []
    for split in SPLITS:
        theirs = published("FedAvg", split)
        pairs = [[theirs["test_loss"], theirs["test_acc"]]]
        for run in results.runs[f"{split}, {AS_PUBLISHED}"]:
            pairs.append([[*run.curve(name)[1]] for name in ("test_loss", "test_accuracy")])
        apart = [
            [
                abs(loss - FLOOR - 1 + accuracy)
                for loss, accuracy in [*zip(*both, strict=True)][len(both[0]) // 4 :]
                if loss is not None and accuracy is not None
            ]
            for both in pairs
        ]
        of_ours = list(itertools.chain(*apart[1:]))
        means = (f"{sum(of) / len(of):.4f}" if of else NONE for of in (apart[0], of_ours))
        rows.append([split, *means])
    return Table(
        title="Is the loss 1.4612 + (1 − accuracy)?",
        header=("clients", "published", "ours"),
        rows=rows,
        published=frozenset({1}),
    )


PUBLISHED_MU = 3.0
MUS = (0.0, 0.001, 0.01, 0.1, 1.0, PUBLISHED_MU)


def fedprox(scale: Scale) -> Recipe:
    """FedProx, section 5.3: mu = 3, and the other values that the report did not try."""
    trials = {
        f"{split}, {form}, mu {mu:g}": Trial(
            split,
            form,
            f"mu {mu:g}",
            {"algorithm": Named("fedprox", {"mu": mu})},
            is_theirs=(form, mu) == (AS_PUBLISHED, PUBLISHED_MU),
        )
        for form in FORMS
        for split in SPLITS
        for mu in scale.pick((0.0, PUBLISHED_MU), (0.0, 0.01, PUBLISHED_MU), MUS)
    }
    return study(scale, "fedprox", trials, _fedprox)


def _fedprox(results: Results, trials: Trials) -> list[Block]:
    alive, saturated = living(results), _saturated(trials)
    mus = list(dict.fromkeys(one.line for one in trials.values()))
    return [
        late(alive, "FedProx", trials, "clients, network, mu"),
        dead_runs(results, saturated),
        *(
            bars(
                mus,
                {s: [alive.late(f"{s}, {form}, {mu}") for mu in mus] for s in SPLITS},
                title=f"Accuracy by mu, {form}",
                digits=1,
            )
            for form in dict.fromkeys(one.form for one in trials.values())
        ),
        *over_published(
            alive, "FedProx", {cell: trials[cell] for cell in saturated}, f"mu {PUBLISHED_MU:g}"
        ),
        note(__name__, "The report's proximal term seems to have had no effect"),
    ]


LITERAL = "equations 4.4 to 4.6"
SAMPLED = {"local": "training", "average": "sampled"}
READINGS: dict[str, dict[str, Any]] = {
    LITERAL: {},
    "dual once": {"local": "training"},
    "dual every step": {"local": "training", "dual": "step"},
    "dual every step, sampled": {"local": "training", "dual": "step", "average": "sampled"},
    "dual once, sampled": SAMPLED,
    "sent before training, sampled": {**SAMPLED, "upload": "before"},
    "sent before training, random duals": {**SAMPLED, "upload": "before", "first_dual": 1.0},
}
"""What the report may have run: it states that gamma = lr, and that the rest is as for FedAvg.

All but the first train for ten epochs."""
ONE_STEP: dict[str, Any] = {"epochs": 1, "momentum": 0.0}
"""The local step in the equations: one full-batch step of length gamma, without momentum."""


def liadmm(scale: Scale) -> Recipe:
    """LIADMM, section 5.4: as its equations have it, and as its figures suggest that it was run."""
    trials = {}
    for form, split in itertools.product(FORMS, SPLITS):
        for reading in list(READINGS)[: scale.pick(3, 4, 7)]:
            whole = reading if reading == LITERAL else f"ten epochs, {reading}"
            rule = Named("liadmm", {"gamma": FORMS[form]["lr"], **READINGS[reading]})
            how = {"algorithm": rule, **(ONE_STEP if reading == LITERAL else {})}
            trials[f"{split}, {whole}{f', {OURS}' * (form == OURS)}"] = Trial(
                split, form, reading, how, is_theirs=form == AS_PUBLISHED
            )
    return study(scale, "liadmm", trials, _liadmm)


def _liadmm(results: Results, trials: Trials) -> list[Block]:
    saturated = {cell: trials[cell] for cell in _saturated(trials)}
    with_logits = {cell: one for cell, one in trials.items() if one.form == OURS}
    return [
        late(results, "LIADMM", trials, "clients, reading"),
        *over_published(results, "LIADMM", saturated, "the report"),
        *(
            curves(
                results,
                {cell: one.line for cell, one in with_logits.items() if one.split == split},
                title=f"LIADMM, {split}, {OURS}: test accuracy",
            )
            for split in SPLITS
        ),
        note(__name__, "What the failure looks like"),
        DOUBLE_SOFTMAX,
    ]


ALGORITHMS = {
    "FedAvg": Named("fedavg"),
    "FedADMM": Named("fedadmm", {"rho": 0.05}),
    "FedADMM, cold start": Named("fedadmm", {"rho": 0.05, "start": "cold"}),
}


def fedadmm(scale: Scale) -> Recipe:
    """FedADMM: an ADMM that, with plain logits, does not fail where the report's LIADMM does."""
    trials = {}
    for form, split in itertools.product((OURS, AS_PUBLISHED), SPLITS):
        for name in list(ALGORITHMS)[: 3 if (form, split) == (OURS, "non-iid") else 2]:
            line = name if form == OURS else f"{name}, {form}"
            trials[f"{line}, {split}"] = Trial(
                split, form, line, {"algorithm": ALGORITHMS[name]}, is_theirs=name != "FedAvg"
            )
    return study(scale, "fedadmm", trials, _fedadmm, ours=True)


def _fedadmm(results: Results, trials: Trials) -> list[Block]:
    alive = living(results)
    return [
        late(alive, "LIADMM", trials, "algorithm, clients"),
        dead_runs(results, _saturated(trials)),
        *(
            curves(
                alive,
                {cell: one.line for cell, one in trials.items() if one.split == split},
                title=f"{split} clients: test accuracy",
            )
            for split in SPLITS
        ),
        Table(
            title="How much the accuracy swings",
            header=("algorithm, clients", "swing"),
            rows=[[cell, f"{100 * alive.swing(cell):.2f}"] for cell in trials],
        ),
        note(__name__, "What is different from LIADMM"),
    ]
