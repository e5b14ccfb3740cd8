"""What privacy of examples costs the methods of the four papers."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from functools import partial

from fedlens.config.experiment import Clients, Experiment, LocalTraining, Named, Privacy
from fedlens.recipes.page import bars, curves, note, recipe
from fedlens.recipes.recipe import Measured, Recipe, Results, Scale, late
from fedlens.report.blocks import Block, Table
from fedlens.report.numbers import NONE
from fedlens.report.pairs import estimate

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
READ_OUT = partial(late, count=10)


def cell(split: str, method: str, epsilon: str) -> str:
    return f"{split}, {method}, ε {epsilon}"


def methods(scale: Scale) -> Recipe:
    axes = itertools.product(SPLITS, METHODS, EPSILONS)
    cells = {cell(*one): _experiment(scale, *one) for one in axes}
    on, seeds = ["fashion-mnist"], (1, 2, 10)
    return recipe(__name__, scale, "methods", blocks, cells=cells, on=on, seeds=seeds, ours=True)


def _experiment(scale: Scale, split: str, method: str, epsilon: str) -> Experiment:
    partition, private = SPLITS[split], None
    if scale.name == "smoke":  # a tenth of the images
        alpha = {name: value for name, value in partition.options.items() if name == "alpha"}
        partition = Named(partition.name, alpha)
    if (target := EPSILONS[epsilon]) is not None:
        counts = 20.0 if method == "FedNS" else None
        private = Privacy(unit="example", epsilon=target, clip=CLIP, count_noise=counts)
    return scale.experiment(
        "fashion-mnist",
        ("linear", "tanh-cnn", "tanh-cnn"),
        (2, 15, 30),
        clients=Clients(count=10, partition=partition),
        local=LocalTraining(batch_size=BATCH, lr=PRIVATE_LR if private else LR),
        privacy=private,
        algorithm=(METHODS[method],),
    )


def blocks(results: Results) -> list[Block]:
    kinds = zip(*(_of_split(results, split) for split in SPLITS), strict=True)
    return [*itertools.chain(*kinds), note(__name__, "How methods is read")]


def _of_split(results: Results, split: str) -> tuple[Block, ...]:
    def ends(method: str, epsilon: str) -> Measured | None:
        return Measured.of(list(map(READ_OUT, results.runs[cell(split, method, epsilon)])))

    return (
        bars(
            list(METHODS),
            {f"ε {epsilon}": [ends(name, epsilon) for name in METHODS] for epsilon in EPSILONS},
            title=f"{split}: accuracy by method and ε",
            digits=1,
        ),
        _table(
            results,
            f"{split}: what privacy costs",
            {m: [(cell(split, m, e), cell(split, m, "∞")) for e in EPSILONS] for m in METHODS},
        ),
        _table(
            results,
            f"{split}: what a method brings",
            {
                f"{m} − FedAvg": [(cell(split, m, e), cell(split, "FedAvg", e)) for e in EPSILONS]
                for m in METHODS
                if m != "FedAvg"
            },
        ),
        curves(
            results,
            {cell(split, name, "2"): name for name in METHODS},
            title=f"{split}: accuracy by round at ε 2",
        ),
    )


def _table(results: Results, title: str, rows: Mapping[str, Sequence[tuple[str, str]]]) -> Table:
    """Differences of two cells each, by seed: a row of them for each method, by ε."""
    body = []
    for name, pairs in rows.items():
        found = [[READ_OUT(a) - READ_OUT(b) for a, b in results.pairs(*pair)] for pair in pairs]
        body.append([name, *(estimate(one).words() if one else NONE for one in found)])
    kept = [row for row in body if any(entry != NONE for entry in row[1:])]
    return Table(title=title, header=["", *(f"ε {epsilon}" for epsilon in EPSILONS)], rows=kept)
