"""What privacy of examples costs the methods of the four papers."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping

from fedlens.config.experiment import Clients, Experiment, LocalTraining, Named, Privacy
from fedlens.recipes.page import bars, curves, note, told
from fedlens.recipes.recipe import Measured, Recipe, Results, Scale
from fedlens.report.blocks import Block, Table
from fedlens.report.numbers import NONE
from fedlens.report.pairs import estimate, points
from fedlens.runs.records import Run

BATCH, STEPS = 256, 24  # of a client with a tenth of the images, in an epoch
METHODS = {
    "FedAvg": Named("fedavg"),
    "FedAvgM": Named("fedavgm", {"momentum": 0.5}),
    "FedProx": Named("fedprox", {"mu": 0.1}),
    "FedVC": Named("fedvc", {"size": BATCH * STEPS}),
    "FedNS": Named("fedns"),
    "FedADMM": Named("fedadmm", {"rho": 0.05}),
}
SPLITS = {
    "iid": Named("iid"),
    "Dirichlet": Named("dirichlet-per-class", {"alpha": 0.5, "min_size": 2000}),
}
EPSILONS = {"∞": None, "8": 8.0, "2": 2.0}
LR, PRIVATE_LR, CLIP = 0.5, 1.0, 0.5
COUNTED = 10  # evaluations at the end


def cell(split: str, method: str, epsilon: str) -> str:
    return f"{split}, {method}, ε {epsilon}"


def methods(scale: Scale) -> Recipe:
    axes = itertools.product(SPLITS, METHODS, EPSILONS)
    return Recipe(
        *told(__name__, "methods"),
        cells={cell(*one): _experiment(scale, *one) for one in axes},
        seeds=range(scale.pick(1, 2, 10)),
        blocks=blocks,
        ours=True,
        stand_in=scale.instead("fashion-mnist"),
        num_classes={"fashion-mnist": 10},
    )


def _experiment(scale: Scale, split: str, method: str, epsilon: str) -> Experiment:
    target, counts = EPSILONS[epsilon], 20.0 if method == "FedNS" else None
    smoke = scale.name == "smoke"
    algorithm, partition = METHODS[method], SPLITS[split]
    if smoke:  # a tenth of the images
        partition = Named(
            partition.name, {k: v for k, v in partition.options.items() if k == "alpha"}
        )
    return Experiment(
        dataset=Named(scale.dataset("fashion-mnist")),
        model=Named(scale.pick("linear", "tanh-cnn", "tanh-cnn")),
        rounds=scale.pick(2, 15, 30),
        engine=scale.engine,
        clients=Clients(count=10, partition=partition),
        local=LocalTraining(batch_size=BATCH, lr=LR if target is None else PRIVATE_LR),
        privacy=None
        if target is None
        else Privacy(unit="example", epsilon=target, clip=CLIP, count_noise=counts),
        algorithm=(algorithm,),
    )


def late(run: Run) -> float:
    """The mean test accuracy of the last evaluations."""
    return statistics.fmean(run.curve("test_accuracy")[1][-COUNTED:])


def _measured(results: Results, name: str) -> Measured | None:
    return Measured.of([late(run) for run in results.runs[name]])


def blocks(results: Results) -> list[Block]:
    shown: list[Block] = []
    for split in SPLITS:
        found: Mapping[str, list[Measured | None]] = {
            f"ε {epsilon}": [_measured(results, cell(split, name, epsilon)) for name in METHODS]
            for epsilon in EPSILONS
        }
        shown.append(
            bars(
                list(METHODS),
                found,
                title=f"{split}: accuracy by method and ε",
                caption=f"Mean test accuracy of the last {COUNTED} rounds.",
                digits=1,
            )
        )
    shown += [_lost(results, split) for split in SPLITS]
    shown += [_ahead(results, split) for split in SPLITS]
    for split in SPLITS:
        names = {cell(split, name, "2"): name for name in METHODS}
        shown.append(curves(results, names, title=f"{split}: accuracy by round at ε 2"))
    return [*shown, note(__name__, "How methods is read")]


def _differences(results: Results, one: str, other: str) -> str:
    found = [late(a) - late(b) for a, b in results.pairs(one, other)]
    if not found:
        return NONE
    told = estimate(found)
    between = "" if told.low is None else f" ({points(told.low)} to {points(told.high)})"
    return f"{points(told.mean)}{between}"


def _table(results: Results, title: str, caption: str, rows: list[list[str]]) -> Table:
    header = ["", *(f"ε {epsilon}" for epsilon in EPSILONS)]
    paired = "In points, paired by seed, with 95% intervals (Student's)."
    kept = [row for row in rows if any(entry != NONE for entry in row[1:])]
    return Table(title=title, caption=f"{caption} {paired}", header=header, rows=kept)


def _lost(results: Results, split: str) -> Table:
    rows = [
        [
            name,
            *(
                _differences(results, cell(split, name, epsilon), cell(split, name, "∞"))
                for epsilon in EPSILONS
            ),
        ]
        for name in METHODS
    ]
    caption = "Accuracy with ε minus the same method's without privacy."
    return _table(results, f"{split}: what privacy costs", caption, rows)


def _ahead(results: Results, split: str) -> Table:
    rows = [
        [
            f"{name} − FedAvg",
            *(
                _differences(results, cell(split, name, epsilon), cell(split, "FedAvg", epsilon))
                for epsilon in EPSILONS
            ),
        ]
        for name in METHODS
        if name != "FedAvg"
    ]
    caption = "Accuracy minus FedAvg's with the same ε."
    return _table(results, f"{split}: what a method brings", caption, rows)
