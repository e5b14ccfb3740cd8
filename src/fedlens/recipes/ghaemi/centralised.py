"""Centralised training, section 5.1: ten epochs of one client that holds everything."""

from __future__ import annotations

from dataclasses import replace

from fedlens.config.experiment import Clients, Evaluate
from fedlens.recipes.ghaemi.setting import (
    AS_PUBLISHED,
    FORMS,
    double_softmax_note,
    experiment,
)
from fedlens.recipes.page import beside, curves
from fedlens.recipes.recipe import Measured, Recipe, Results, Scale
from fedlens.report.blocks import Block, Text

PUBLISHED = {
    "test_accuracy": 0.8836,
    "test_precision": 0.8941,
    "test_recall": 0.8836,
    "test_f1": 0.8850,
    "train_accuracy": 0.8996,
}
RECALL = (0.698, 0.972, 0.759, 0.939, 0.810, 0.958, 0.797, 0.950, 0.982, 0.971)  # by class
TRAIN_LOSS = (1.735, 1.552)  # during training, in the first and the last epoch


def centralised(scale: Scale) -> Recipe:
    cells = {
        form: replace(
            alone := experiment(scale, "iid", **how),
            rounds=scale.pick(2, 5, 10),
            clients=Clients(count=1),
            # A round is an epoch, and the momentum is never reset.
            local=replace(alone.local, epochs=1, reset=False),
            evaluate=Evaluate(on=("test", "train")),
        )
        for form, how in FORMS.items()
    }
    return Recipe(
        title="Centralised training on Fashion-MNIST",
        about="The report's yardstick: ten epochs of SGD on all 60,000 images. Its text says that "
        "no federated algorithm reaches it; by its own figures FedAvg and FedProx pass it.",
        cells=cells,
        seeds=range(scale.pick(1, 1, 3)),
        blocks=blocks,
        stand_in=scale.instead("fashion-mnist"),
    )


def blocks(results: Results) -> list[Block]:
    rows = [
        (f"{name.replace('_', ' ')}, {form}", theirs if form == AS_PUBLISHED else None, found)
        for form in FORMS
        for name, theirs in PUBLISHED.items()
        if (found := results.final(form, name)) or theirs
    ]
    losses = [
        (f"{when} epoch", theirs, results.at(AS_PUBLISHED, place, "train_loss"))
        for when, theirs, place in zip(("first", "last"), TRAIN_LOSS, (0, -1), strict=True)
    ]
    return [
        beside(rows, title="After the last epoch, %", of="measure, network"),
        beside(
            losses,
            title="Loss while training, double softmax",
            of="",
            percent=False,
            digits=3,
        ),
        beside(
            [
                (name, theirs, ours)
                for name, theirs, ours in zip(
                    _classes(results), RECALL, _recall(results), strict=True
                )
            ],
            title="Recall by class, double softmax, %",
            caption="The share of each class's test images that is recognised, after the last "
            "epoch.",
            of="class",
        ),
        curves(
            results,
            list(FORMS),
            "test_accuracy",
            title="Test accuracy by epoch",
            caption="Accuracy on the test images after each epoch of centralised training.",
            x_label="epoch",
            y_label="test accuracy",
        ),
        Text(
            title="Text and figures disagree",
            paragraphs=(
                "The report says that the federated algorithms “cannot reach the accuracy achieved "
                "by centralized training”. Its figures say otherwise: 88.36% centralised, after "
                "ten epochs, against 89.8% for FedAvg and FedProx with iid clients after 80 rounds "
                "of ten local epochs. A round trains ten clients of 600 images for ten epochs: "
                "one epoch's worth of images, so the federated runs see eight times as many.",
            ),
        ),
        double_softmax_note(),
    ]


def _classes(results: Results) -> list[str]:
    classes: list[str] = next(iter(results.runs.values()))[0].manifest["classes"]
    return classes


def _recall(results: Results) -> list[Measured | None]:
    """Our recall by class, over seeds."""
    counts = [run.evaluation["confusion"] for run in results.runs[AS_PUBLISHED]]
    return [
        Measured.of([table[label][label] / sum(table[label]) for table in counts])
        for label in range(len(RECALL))
    ]
