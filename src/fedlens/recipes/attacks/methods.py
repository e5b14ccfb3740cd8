"""What one hostile client of ten does to the methods of four papers."""

from __future__ import annotations

from itertools import product

from fedlens.config.experiment import Clients, Experiment, LocalTraining, Named
from fedlens.recipes.page import bars, curves, note, recipe
from fedlens.recipes.recipe import Recipe, Results, Scale
from fedlens.report.blocks import Block, Table
from fedlens.report.pairs import corrected, points

BATCH, STEPS = 64, 94  # of a client with a tenth of the images
METHODS = {
    "FedAvg": Named("fedavg"),
    "FedAvgM": Named("fedavgm", {"momentum": 0.5}),
    "FedVC": Named("fedvc", {"size": BATCH * STEPS}),
    "FedIR": Named("fedir"),
    "FedNS": Named("fedns"),
    "FedADMM": Named("fedadmm", {"rho": 0.05}),
}
SPLITS: dict[str, Named] = {
    "iid": Named("iid"),
    "Dirichlet 0.1": Named("dirichlet-per-class", {"alpha": 0.1, "min_size": 100}),
}
NOBODY = "no attack"
ATTACKS = {
    NOBODY: {},
    "label-flip": {},
    "sign-flip": {"scale": 3.0},
    "gaussian": {"sigma": 0.1},
    "optimal-ipm": {},
}
"""Flipped signs and the strongest of sixteen lengths pull against all others; noise has no aim."""


def attacks(scale: Scale) -> tuple[str, ...]:
    return scale.pick((NOBODY, "sign-flip"), (NOBODY, "sign-flip", "optimal-ipm"), tuple(ATTACKS))


def methods(scale: Scale) -> Recipe:
    axes = product(SPLITS, METHODS, attacks(scale))
    cells = {", ".join(one): _experiment(scale, *one) for one in axes}
    on, seeds = ["fashion-mnist"], (1, 2, 10)
    return recipe(__name__, scale, "methods", blocks, cells=cells, on=on, seeds=seeds, ours=True)


def _experiment(scale: Scale, split: str, method: str, attack: str) -> Experiment:
    partition = SPLITS[split]
    if scale.name == "smoke" and partition.options:  # a tenth of the images
        partition = Named(partition.name, {"alpha": 0.1, "min_size": 10})
    return scale.experiment(
        "fashion-mnist",
        ("linear", "lenet5", "lenet5"),
        (2, 15, 30),
        clients=Clients(count=10, partition=partition),
        local=LocalTraining(batch_size=BATCH, lr=0.05),
        algorithm=(METHODS[method],),
        attack=None if attack == NOBODY else Named(attack, {"clients": 1, **ATTACKS[attack]}),
    )


def blocks(results: Results) -> list[Block]:
    some = attacks(results.scale)
    shown: list[Block] = [
        bars(
            list(METHODS),
            {a: [results.final(f"{split}, {m}, {a}") for m in METHODS] for a in some},
            title=f"{split}: accuracy with one hostile client of ten",
            digits=1,
        )
        for split in SPLITS
    ]
    for split in SPLITS:
        lost = {
            (method, attack): values
            for attack, method in product(some[1:], METHODS)
            if (
                values := results.differences(
                    f"{split}, {method}, {NOBODY}", f"{split}, {method}, {attack}"
                )
            )
        }
        rows = [
            [*key, points(one.mean), one.between, one.chance]
            for key, one in corrected(lost).items()
        ]
        header = ("method", "attack", "loses", "95% confidence interval", "p (Holm)")
        shown.append(Table(title=f"{split}: what the attack costs", header=header, rows=rows))
    shown += [
        curves(
            results,
            {f"{split}, {method}, {some[-1]}": method for method in METHODS},
            title=f"{split}: accuracy by round under {some[-1]}",
        )
        for split in SPLITS
    ]
    return [*shown, note(__name__, "How methods is read")]
