"""What the items of Ghaemi's report on FedAvg, FedProx and LIADMM share."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.resources import files
from typing import Any, Literal

from fedlens.config.experiment import Clients, Evaluate, Experiment, LocalTraining, Named
from fedlens.recipes.page import curves, mean_of
from fedlens.recipes.recipe import Measured, Results, Scale
from fedlens.report.blocks import Block, Table, Text
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


def experiment(
    scale: Scale,
    split: Split,
    *algorithm: Named,
    loss: str = "double_softmax",
    lr: float = 0.05,
    momentum: float = 0.9,
    epochs: int | None = None,
) -> Experiment:
    """The report's setting: 10 of 100 clients per round, ten epochs, batches of 128, 80 rounds."""
    paper4 = Named("mcmahan-cnn", {"geometry": "paper4"})
    return Experiment(
        dataset=Named(scale.dataset("fashion-mnist")),
        model=scale.pick(Named("linear"), Named("lenet5"), paper4),
        rounds=scale.pick(2, 20, 80),
        loss=loss,
        engine=scale.engine,
        clients=Clients(
            count=scale.pick(20, 100, 100),
            per_round=scale.pick(2, 10, 10),
            partition=PARTITION[split],
        ),
        local=LocalTraining(
            epochs=epochs or scale.pick(1, 5, 10),
            batch_size=scale.pick(64, 128, 128),
            lr=lr,
            momentum=momentum,
        ),
        evaluate=Evaluate(on=("test", "train") if scale.name == "paper" else ("test",)),
        algorithm=algorithm,
    )


def published(algorithm: str, split: Split) -> dict[str, list[float | None]]:
    """The report's curves, read from its figures to within 0.005: train and test, loss and acc."""
    content = json.loads(
        (files("fedlens.recipes.ghaemi") / "curves.json").read_text(encoding="utf-8")
    )
    found: dict[str, list[float | None]] = content[
        f"{algorithm} {'iid' if split == 'iid' else 'noniid'}"
    ]
    return found


def over_published(
    results: Results,
    algorithm: str,
    cells: Mapping[Split, Mapping[str, str]],
    theirs: str = AS_PUBLISHED,
) -> list[Block]:
    """Accuracy and loss by round, for each split, together with the curves of the report.

    `cells` gives, by split, the cells to show and the names of their lines. The report's curve is
    named `theirs`, and has the colour of our line with that name, if there is one.
    """
    on_train = results.scale.name == "paper"
    measures = {"test_acc": "test_accuracy", "test_loss": "test_loss"}
    if on_train:
        measures |= {"train_acc": "train_accuracy", "train_loss": "train_set_loss"}
    blocks: list[Block] = []
    for split, named in cells.items():
        for measure, ours in measures.items():
            part, _, what = measure.partition("_")
            what = "accuracy" if what == "acc" else "loss"
            chosen = dict(named)
            if what == "loss":  # the two kinds of loss cannot share an axis
                chosen = {c: n for c, n in named.items() if not n.startswith(OURS)}
            blocks.append(
                curves(
                    results,
                    chosen,
                    ours,
                    title=f"{algorithm}, {split}: {part} {what}",
                    caption=f"The {part} {what} of the server's model after each round. Broken: "
                    "the report's figure, digitised to within 0.005.",
                    published={
                        theirs: _as_far_as_ours(published(algorithm, split)[measure], results)
                    },
                    y_label=f"{part} {what}",
                )
            )
    return blocks


def _as_far_as_ours(values: Sequence[float | None], results: Results) -> list[float | None]:
    """The published curve, cut to our number of rounds."""
    rounds = max(run.num_rounds for cell in results.runs.values() for run in cell)
    return list(values[:rounds])


def late_published(algorithm: str, split: Split) -> float:
    """The mean of the published test accuracy over the last quarter of the rounds, 61 to 80."""
    values = [v for v in published(algorithm, split)["test_acc"][60:] if v is not None]
    return sum(values) / len(values)


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


def dead_runs(results: Results, cells: Sequence[str]) -> Table:
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
        caption="A run is dead if it gives one class to all test images in every evaluation of the "
        "last quarter of the rounds: its accuracy is 0.100, and saturated as it is the double "
        "softmax gives no gradient back. Which runs die depends on the seed and on rounding. Their "
        "share is told here; the table above and the curves are of the others, in %.",
        header=("clients, network", "dead", "their seeds", "the others"),
        rows=rows,
    )


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
        words.append(mean_of(replace(results, runs={cell: alive}).late(cell), 1, times=100))
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


def double_softmax_note() -> Text:
    return Text(
        title="The network ended in a softmax, and the loss had another",
        paragraphs=(
            "In all six curves of the report, from round 21 on, the loss is 1.4612 + (1 − "
            "accuracy) to within 0.015, and 0.005 on average. 1.4612 = ln(1 + 9/e) is the least "
            "that cross-entropy can be when it is given probabilities in place of logits: its last "
            "layer was a softmax, and cross-entropy applies a softmax of its own. A net that is "
            "sure of itself then has a loss of 1.4612 where it is right and 2.4612 where it is "
            "wrong. So the report's losses are no cross-entropies, and the gradient vanishes "
            "wherever the net is sure, right or wrong.",
            "Every run marked double softmax is trained and measured that way. Runs marked logits "
            "end in plain logits; their learning rate is 0.01 unless another is named, since with "
            "logits the report's 0.05 with momentum 0.9 leaves the finite numbers on two-class "
            "clients: only the bounded gradient of the double softmax lets it pass.",
        ),
    )
