"""Settings of published comparisons of personal methods, with our protocol beside theirs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedlens.config.experiment import Clients, Evaluate, LocalTraining, Named
from fedlens.data.augment import Augment
from fedlens.recipes.page import bars, beside, curves, note, published, recipe, sentences
from fedlens.recipes.recipe import Measured, Recipe, Results, Scale
from fedlens.report.blocks import Block, Series, Table
from fedlens.report.numbers import NONE
from fedlens.report.pairs import Estimate, corrected, picture_of, points
from fedlens.report.personal import shares
from fedlens.runs.records import Run

ALONE, TUNED = "local-only", "fine-tuned"
BASELINES = {
    "FedAvg": Named("fedavg"),
    TUNED: Named("fine-tune"),
    ALONE: Named("local-only"),
}
METHODS = {
    **BASELINES,
    "FedProx": Named("fedprox", {"mu": 0.01}),
    "Per-FedAvg": Named("per-fedavg"),
    "pFedMe": Named("pfedme"),
    "Ditto": Named("ditto"),
    "APFL": Named("apfl"),
    "FedALA": Named("fedala"),
    "FedPer": Named("fedper"),
    "FedRep": Named("fedrep", {"head_epochs": 1}),
    "LG-FedAvg": Named("lg-fedavg"),
    "FedBABU": Named("fedbabu"),
    "FedProto": Named("fedproto"),
}
ROUNDS = {"fashion-mnist": 15, "cifar100": 12}  # by data set, at the scale small
OF_FEDREP = {  # classes of a client: passes of the head, then of the body
    2: (10, 1),
    5: (10, 5),
}
on_cifar10 = partial(recipe, __name__, on=["cifar10"])


def pfllib_dir(scale: Scale) -> Recipe:
    """PFLlib's board, with clients by Dir(0.1) per class."""
    model = Named("mcmahan-cnn", {"geometry": "valid"})
    partition = Named("dirichlet-per-class", {"alpha": 0.1, "min_size": 40})
    if scale.name == "smoke":
        partition = Named("dirichlet", {"alpha": 1.0, "size": 40})
    cells = {
        f"{dataset}, {name}": scale.experiment(
            dataset,
            ("lenet5", model, model),
            (2, ROUNDS[dataset], 2000),
            normalise={"mean": 0.5, "deviation": 0.5},
            clients=Clients(count=scale.pick(8, 20, 20), holdout=0.25, partition=partition),
            local=LocalTraining(batch_size=10, lr=0.005),
            evaluate=Evaluate(every=scale.pick(1, 1, 10), on=(), baselines=False),
            algorithm=(method,),
        )
        for dataset in ROUNDS
        for name, method in METHODS.items()
    }

    def blocks(results: Results) -> list[Block]:
        shown: list[Block] = []
        for dataset in ROUNDS:
            theirs = published(__name__)[dataset] if scale.dataset(dataset) == dataset else {}
            shown += board(results, f"{dataset}, ", tuple(METHODS), theirs)
        return [*shown, note(__name__, "PFLlib's settings and ours")]

    small = sentences(__name__, "Small")
    return recipe(__name__, scale, "pfllib-dir", blocks, cells=cells, on=[*ROUNDS], small=small)


def fedrep(scale: Scale) -> Recipe:
    """CIFAR-10 with two and with five classes a client, as in FedRep's scripts."""
    cells = {}
    for per_client, (head, body) in OF_FEDREP.items():
        passes = scale.pick(2, head + body, head + body)
        own = {"head_epochs": scale.pick(1, head, head)}
        plain = scale.experiment(
            "cifar10",
            ("lenet5", "fedrep-cnn", "fedrep-cnn"),
            (2, 40, 100),
            clients=Clients(
                count=scale.pick(10, 100, 100),
                per_round=0.1,
                holdout=1 / 6,
                partition=Named("shards", {"per_client": per_client}),
            ),
            local=LocalTraining(
                epochs=passes, batch_size=scale.pick(50, 10, 10), lr=0.01, momentum=0.5
            ),
            evaluate=Evaluate(every=scale.pick(1, 5, 5), on=(), baselines=False),
        )
        trained = replace(plain.local, epochs=passes - own["head_epochs"])
        for name in (*BASELINES, "FedPer", "LG-FedAvg", "FedBABU", "Ditto"):
            cells[f"{per_client} classes, {name}"] = replace(plain, algorithm=(METHODS[name],))
        cells[f"{per_client} classes, FedRep"] = replace(
            plain, local=trained, algorithm=(Named("fedrep", own),)
        )
    names = tuple(cell.partition(", ")[2] for cell in cells if cell.startswith("2 "))

    def blocks(results: Results) -> list[Block]:
        each = (board(results, f"{many} classes, ", names, {}) for many in OF_FEDREP)
        return [*(block for one in each for block in one), note(__name__, "FedRep's settings")]

    small = "40 of 100 rounds, one seed of five."
    return on_cifar10(scale, "fedrep", blocks, cells=cells, seeds=(1, 1, 5), small=small)


def moon(scale: Scale) -> Recipe:
    """CIFAR-10 as in Flower's baseline of MOON."""
    methods = {
        "FedAvg": Named("fedavg"),
        "FedProx": Named("fedprox", {"mu": 0.01}),
        "MOON": Named("moon", {"mu": 1.0, "tau": 0.5}),
    }
    least = scale.pick(1, 500, 500)
    partition = Named("dirichlet-per-class", {"alpha": 0.5, "min_size": least})
    steps: dict[str, Any] = {"lr": 0.01, "momentum": 0.9, "weight_decay": 1e-5}
    local = LocalTraining(epochs=scale.pick(1, 10, 10), batch_size=64, **steps)
    cells = {
        name: scale.experiment(
            "cifar10",
            ("lenet5", "simple-cnn", "simple-cnn"),
            (2, 10, 100),
            augment=Augment(crop=4, flip=True),
            clients=Clients(count=10, partition=partition),
            local=local,
            algorithm=(method,),
        )
        for name, method in methods.items()
    }

    def blocks(results: Results) -> list[Block]:
        theirs = published(__name__)["moon"]
        table = beside(
            [(name, theirs.get(name), results.final(name)) for name in methods],
            title="Test accuracy after the last round, %",
            of="method",
            compared=scale.dataset("cifar10") == "cifar10",
        )
        by_round = curves(results, title="Test accuracy by round")
        return [by_round, table, note(__name__, "MOON's settings")]

    small = "10 of 100 rounds, one seed of three."
    return on_cifar10(scale, "moon", blocks, cells=cells, small=small)


def by_client(run: Run) -> NDArray[Any]:  # [K]; NaN where nothing is tested
    """The accuracy of each client's model after the last round, tuned if the algorithm tunes."""
    found = shares(run, "federated")
    return found if len(found) else shares(run, "client_accuracy")


def by_images(run: Run) -> float:
    """The same as a mean in which every test image counts alike."""
    own, tested = by_client(run), shares(run, "client_tested")
    known = np.isfinite(own)
    return float(np.average(own[known], weights=tested[known])) if known.any() else math.nan


def best_round(run: Run) -> float:
    """The same after the round that was best on these very images: PFLlib's rule."""
    return max([by_images(run), *run.curve("client_accuracy_weighted")[1]])


def board(
    results: Results, of: str, names: Sequence[str], theirs: Mapping[str, float]
) -> list[Block]:
    """Both rules beside what was published, and what each method gains for clients."""
    runs = {name: results.runs[of + name] for name in names}
    found = {
        column: {name: Measured.of(list(map(score, runs[name]))) for name in names}
        for column, score in (
            ("best round", best_round),
            ("last round", by_images),
            ("mean of clients", _mean),
        )
    }
    against = {other: _gains(results, of, names, other) for other in (ALONE, TUNED)}
    where = of.removesuffix(", ")

    def gain(one: Estimate | None) -> str:
        if one is None or one.p is None:
            return NONE if one is None else points(one.mean)
        return f"{one.words()}, {one.chance}"

    table = Table(
        title=f"{where}: their rule and ours",
        header=("method", "published", *found, *(f"− {other}" for other in against)),
        rows=[
            [
                name,
                f"{100 * theirs[name]:.2f}" if name in theirs else NONE,
                *(f"{100 * one.mean:.2f}" if (one := of[name]) else NONE for of in found.values()),
                *(gain(gains.get(name)) for gains in against.values()),
            ]
            for name in names
            if runs[name]
        ],
        published=frozenset({1}),
    )
    both = bars(
        names,
        {rule: [*found[rule].values()] for rule in ("best round", "last round")},
        *([Series("published", [theirs.get(name) for name in names])] if theirs else []),
        title=f"{where}: accuracy by method",
        digits=1,
    )
    title = f"{where}: who gains by federating?"
    gains = against[ALONE]
    picture = [picture_of(gains, "gain over local-only", title=title, digits=1)] if gains else []
    return [both, table, *picture]


def _mean(run: Run) -> float | None:
    own = by_client(run)
    return float(np.nanmean(own)) if np.isfinite(own).any() else None


def _gains(results: Results, of: str, names: Sequence[str], other: str) -> dict[str, Estimate]:
    """What each method gains over another for clients."""
    found = {}
    for name in names:
        pairs = results.pairs(of + name, of + other)
        gained = [by_client(a) - by_client(b) for a, b in pairs if len(by_client(a))]
        values = [x for one in gained for x in one.tolist() if math.isfinite(x)]
        if name != other and values:
            found[name] = values
    return corrected(found)
