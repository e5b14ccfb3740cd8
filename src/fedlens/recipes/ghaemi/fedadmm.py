"""FedADMM: an ADMM that, with plain logits, does not fail where the report's LIADMM does."""

from __future__ import annotations

from fedlens.config.experiment import Named
from fedlens.recipes.ghaemi.setting import (
    AS_PUBLISHED,
    FORMS,
    OURS,
    SPLITS,
    dead_runs,
    experiment,
    late_published,
    living,
)
from fedlens.recipes.page import beside, curves
from fedlens.recipes.recipe import Recipe, Results, Scale
from fedlens.report.blocks import Block, Table, Text

ALGORITHMS = {
    "FedAvg": Named("fedavg"),
    "FedADMM": Named("fedadmm", {"rho": 0.05}),
    "FedADMM, cold start": Named("fedadmm", {"rho": 0.05, "start": "cold"}),
}


def fedadmm(scale: Scale) -> Recipe:
    cells = {
        f"{name}, {split}": experiment(scale, split, algorithm, **FORMS[OURS])
        for split in SPLITS
        for name, algorithm in ALGORITHMS.items()
        if split == "non-iid" or "cold" not in name
    }
    cells |= {
        f"{name}, {AS_PUBLISHED}, {split}": experiment(
            scale, split, ALGORITHMS[name], **FORMS[AS_PUBLISHED]
        )
        for split in SPLITS
        for name in ("FedAvg", "FedADMM")
    }
    return Recipe(
        title="FedADMM on Fashion-MNIST",
        about="ADMM with two classes a client and a tenth of the clients a round: the server keeps "
        "what every client sent last, and clients minimise the augmented Lagrangian by ordinary "
        "local training. Beside it FedAvg in the same setting, both with plain logits and in the "
        "report's form, which has a softmax too many.",
        cells=cells,
        seeds=range(scale.pick(1, 1, 3)),
        blocks=blocks,
        ours=True,
        stand_in=scale.instead("fashion-mnist"),
    )


def blocks(results: Results) -> list[Block]:
    alive = living(results)
    rows = [
        (
            cell,
            late_published("LIADMM", "iid" if cell.endswith(", iid") else "non-iid")
            if cell.startswith("FedADMM")
            else None,
            alive.late(cell),
        )
        for cell in results.runs
    ]
    shown = {
        split: {
            cell: cell.removesuffix(f", {split}")
            for cell in results.runs
            if cell.endswith(f", {split}")
        }
        for split in SPLITS
    }
    return [
        beside(
            rows,
            title="Test accuracy over the last quarter of the rounds, %",
            caption="Published: the report's LIADMM. The mean over the last quarter of the rounds "
            "(61 to 80 in the report). Runs that ended dead are left out.",
            of="algorithm, clients",
        ),
        dead_runs(results, [cell for cell in results.runs if AS_PUBLISHED in cell]),
        *(
            curves(
                alive,
                shown[split],
                title=f"{split} clients: test accuracy",
                caption="Accuracy on the test images after each round, with plain logits unless a "
                "line says otherwise.",
                y_label="test accuracy",
            )
            for split in SPLITS
        ),
        Table(
            title="How much the accuracy swings",
            caption="The standard deviation of test accuracy over the last quarter of the rounds "
            "within a run, in points.",
            header=("algorithm, clients", "swing"),
            rows=[[cell, f"{100 * alive.swing(cell):.2f}"] for cell in results.runs],
        ),
        Text(
            title="What is different from LIADMM",
            paragraphs=(
                "Each client minimises f(v) + (rho/2) |v − x + u|² from the server's x, so the "
                "pull towards x is there in every local step and the dual u cannot push a client "
                "without bound; LIADMM subtracts the dual and has no such pull once its single "
                "step is replaced by training.",
                "The server's model is the mean over the last z = v + u of all clients seen so "
                "far, not over the round's. With a warm start a client counts from its first "
                "round on; with a cold start all clients count at once, those not yet seen with "
                "the initial model, which holds the first rounds back.",
            ),
        ),
    ]
