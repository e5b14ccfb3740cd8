"""What one hostile client of ten does to the methods of four papers."""

from __future__ import annotations

from fedlens.config.experiment import Clients, Experiment, LocalTraining, Named
from fedlens.evaluation.intervals import holm
from fedlens.recipes.page import bars, curves, note, told
from fedlens.recipes.recipe import Recipe, Results, Scale
from fedlens.report.blocks import Block, Table
from fedlens.report.pairs import estimate, format_p, points

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


def cell(split: str, method: str, attack: str) -> str:
    return f"{split}, {method}, {attack}"


def methods(scale: Scale) -> Recipe:
    return Recipe(
        *told(__name__, "methods"),
        blocks,
        cells={
            cell(split, method, attack): _experiment(scale, split, method, attack)
            for split in SPLITS
            for method in METHODS
            for attack in attacks(scale)
        },
        seeds=range(scale.pick(1, 2, 10)),
        ours=True,
        stand_in=scale.instead("fashion-mnist"),
    )


def _experiment(scale: Scale, split: str, method: str, attack: str) -> Experiment:
    partition = SPLITS[split]
    if scale.name == "smoke" and partition.options:  # a tenth of the images
        partition = Named(partition.name, {"alpha": 0.1, "min_size": 10})
    return Experiment(
        dataset=Named(scale.dataset("fashion-mnist")),
        model=Named(scale.pick("linear", "lenet5", "lenet5")),
        rounds=scale.pick(2, 15, 30),
        engine=scale.engine,
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
            {a: [results.final(cell(split, m, a)) for m in METHODS] for a in some},
            title=f"{split}: accuracy with one hostile client of ten",
            digits=1,
        )
        for split in SPLITS
    ]
    for split in SPLITS:
        found = {}
        for attack in some[1:]:
            for method in METHODS:
                lost = results.differences(cell(split, method, NOBODY), cell(split, method, attack))
                if lost:
                    found[method, attack] = estimate(lost)
        sure = holm([one.p for one in found.values()])
        rows = [
            [method, attack, points(one.mean), one.between, "–" if p is None else format_p(p)]
            for ((method, attack), one), p in zip(found.items(), sure, strict=True)
        ]
        header = ("method", "attack", "loses", "95% confidence interval", "p (Holm)")
        shown.append(Table(title=f"{split}: what the attack costs", header=header, rows=rows))
    shown += [
        curves(
            results,
            {cell(split, method, some[-1]): method for method in METHODS},
            title=f"{split}: accuracy by round under {some[-1]}",
        )
        for split in SPLITS
    ]
    return [*shown, note(__name__, "How methods is read")]
