"""Table 1 and Figures 1, 2, 3 and 10: how classes and examples are spread over clients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from fedlens.config.experiment import Clients, Experiment, Named
from fedlens.core.federation import Dataset, Examples, Federation, Holdings
from fedlens.data.emd import emd
from fedlens.recipes.hsu2020 import cifar
from fedlens.recipes.hsu2020.setting import (
    EMD,
    NAMES,
    OUR_EPOCHS,
    Population,
    centralised,
    is_other_data,
    partitionings,
    population,
    stand_in,
)
from fedlens.recipes.page import beside, mean_of, told
from fedlens.recipes.recipe import Measured, Recipe, Results, Scale
from fedlens.report.blocks import Block, Curves, Heat, Line, Table
from fedlens.report.numbers import NONE
from fedlens.setup import partition
from fedlens.setup.data import split_examples


def label_counts(scale: Scale, clients: Population) -> Tensor:  # [K, L]
    """The number of examples of each class that each client holds."""
    return _dealt(scale, clients)[2]


def _dealt(scale: Scale, clients: Population) -> tuple[Dataset, Holdings, Tensor]:
    """A data set, who holds which of its examples, and the examples of each class by client."""
    dataset, train, held = partition(described(clients), scale.data)
    return dataset, held, held.label_counts(train.labels, dataset.num_classes)


def described(clients: Population) -> Experiment:
    return Experiment(
        dataset=clients.dataset,
        model=clients.model,
        rounds=1,
        clients=Clients(count=clients.count, partition=clients.partition),
    )


def _of_clients(
    counts: Mapping[str, Tensor], what: Literal["classes", "examples"], **told: Any
) -> Curves:
    """How much each client holds, with clients in decreasing order."""
    return Curves(
        lines=[
            _by_rank(name, (c > 0 if what == "classes" else c).sum(1).double(), most=200)
            for name, c in counts.items()
        ],
        x_label="client, by rank",
        log_x=True,
        log_y=True,
        **told,
    )


def _by_rank(name: str, values: Tensor, most: int | None = None) -> Line:
    """Values in decreasing order; with `most`, about so many of them, even on a log axis.

    A few hundred points show as much as nine thousand, and are drawn much faster.
    """
    ordered = values.sort(descending=True).values
    at = torch.arange(1, len(ordered) + 1)
    if most is not None:
        at = torch.logspace(0, torch.log10(torch.tensor(len(ordered) + 0.0)), most).long()
        at = torch.unique(at.clamp(1, len(ordered)))
    return Line(name, at.tolist(), ordered[at - 1].tolist())


TABLE1 = {  # clients, imbalanced, classes, examples, centralised accuracy in percent
    "CIFAR-10": ("100", "no", 10, 50_000, 86.16),
    "CIFAR-100": ("100", "no", 100, 50_000, 55.21),
    "iNaturalist-Geo-3k": ("135", "yes", 1203, 120_300, 57.90),
    "iNaturalist-User-120k": ("9,275", "yes", 1203, 120_300, 57.90),
    "Landmarks-User-160k": ("1,262", "yes", 2028, 164_172, 67.05),
}
CIFAR = {"CIFAR-10": "cifar10", "CIFAR-100": "cifar100"}
CELLS = {  # named as in other items, which have the same runs
    **{name: f"{dataset}, centralised" for name, dataset in CIFAR.items()},
    **{name: f"{which}, centralised" for which, name in NAMES.items()},
}


def populations(scale: Scale) -> dict[str, Population]:
    """The populations of the table; if drawn from records, those whose data the records have."""
    found: dict[str, Population] = {}
    for name in TABLE1:
        try:
            found[name] = _population(scale, name)
        except ValueError:
            is_last = name == list(TABLE1)[-1]
            if scale.recorded is None or (is_last and not found):
                raise
    return found


def _population(scale: Scale, name: str) -> Population:
    if name not in CIFAR:
        return population(scale, next(which for which in NAMES if NAMES[which] == name))
    dataset = CIFAR[name]
    split = Named("dirichlet", {"alpha": cifar.ALPHAS[dataset][0]})
    return Population(name, name, Named(scale.dataset(dataset)), Named("linear"), split, 100)


def table1(scale: Scale) -> Recipe:
    """Table 1: the training sets, and what centralised learning reaches on them."""
    shown = populations(scale)
    cells = {}
    for name, one in shown.items():
        if name not in CIFAR:
            cells[CELLS[name]] = centralised(scale, one)
        elif name == "CIFAR-10" or scale.name == "paper":
            cells[CELLS[name]] = cifar.centralised(scale, CIFAR[name])
    of_cifar = cifar.stand_in(scale) if CIFAR.keys() & shown else ""
    others = stand_in(*(one for name, one in shown.items() if name not in CIFAR))
    return Recipe(
        *told(__name__, "table1", epochs=OUR_EPOCHS),
        cells=cells,
        seeds=range(scale.pick(1, 1, 3)),
        blocks=lambda results: _table1(results, shown),
        stand_in=" ".join(filter(None, (of_cifar, others))),
        other_data=is_other_data(*shown.values()),
    )


def _table1(results: Results, shown: dict[str, Population]) -> list[Block]:
    rows: list[list[str]] = []
    for name, one in shown.items():
        clients, imbalanced, classes, examples, accuracy = TABLE1[name]
        ours = _held(results.scale, one)
        rows.append(
            [
                name,
                one.dataset.name if not one.is_stand_in else one.used,
                *(clients, ours[0]),
                *(imbalanced, ours[1]),
                *(f"{classes:,}", ours[2]),
                *(f"{examples:,}", ours[3]),
                *(f"{accuracy:.2f}", mean_of(results.final(CELLS[name]))),
            ]
        )
    header = ["data set", "used here"]
    for column in ("clients", "imbalanced", "classes", "examples", "centralised accuracy"):
        header += [f"{column}, published", f"{column}, ours"]
    has_gaps = any(NONE in row for row in rows)
    return [
        Table(
            title="Training sets",
            caption="Published numbers beside those of the data used here. Centralised accuracy in "
            "%."
            + (" – stands for what would take data that are not here, or was not run." * has_gaps),
            header=header,
            rows=rows,
            published=frozenset(range(2, len(header), 2)),
        )
    ]


def _held(scale: Scale, one: Population) -> tuple[str, str, str, str]:
    """Clients, whether they are imbalanced, classes and examples, if the data are available."""
    if not scale.holds(one.dataset.name):
        return NONE, NONE, NONE, NONE
    counts = label_counts(scale, one)
    sizes = counts.sum(1)
    imbalanced = "yes" if sizes.max() > sizes.min() else "no"
    return f"{len(counts):,}", imbalanced, f"{counts.shape[1]:,}", f"{int(sizes.sum()):,}"


def figure1(scale: Scale) -> Recipe:
    """Figure 1: classes are not everywhere alike."""
    clients = population(scale, "geo")
    return Recipe(
        *told(__name__, "figure1"),
        blocks=lambda results: _figure1(results, clients),
        stand_in=stand_in(clients),
    )


def _figure1(results: Results, clients: Population) -> list[Block]:
    dataset, held, counts = _dealt(results.scale, clients)
    shares = counts.T / counts.sum(0).clamp(min=1)[:, None]  # [L, K] shares of each class by client
    one, two = furthest_apart(shares)
    apart = float((shares[one] - shares[two]).abs().sum())
    order = (shares[one] - shares[two]).argsort(descending=True)
    names = held.names or [str(k) for k in range(len(counts))]
    return [
        Heat(
            title="Two classes over the clients",
            caption="Which share of each class's examples a client holds; clients in order from "
            "those that hold more of the first to those that hold more of the second.",
            values=[shares[label][order].tolist() for label in (one, two)],
            row_names=[dataset.classes[one], dataset.classes[two]],
            column_names=[names[k] for k in order.tolist()],
            row_label="class",
            column_label="client",
            value_label="share of the class",
            percent=True,
            shares=True,
        ),
        Table(
            title="How far apart they are",
            caption="The distance between the two classes' distributions over clients: 0 if they "
            "are alike, 2 if no client holds both.",
            header=("classes", "distance"),
            rows=[[f"{dataset.classes[one]} and {dataset.classes[two]}", f"{apart:.2f}"]],
        ),
    ]


def furthest_apart(shares: Tensor) -> tuple[int, int]:
    """The two rows of `shares` [L, K] with the largest L1 distance; the first of equals."""
    distances = torch.cdist(shares.double(), shares.double(), p=1)  # [L, L]
    place = int(distances.argmax())
    return place // len(shares), place % len(shares)


ORIGINAL = {  # iNaturalist-2017, and its balanced subset with 100 examples per class
    "training images, original": 579_184,
    "test images, original": 95_986,
    "classes, balanced": 1203,
    "training images, balanced": 120_300,
}
CLIENTS = {
    "iNaturalist-Geo-30k": 11,
    "iNaturalist-Geo-3k": 135,
    "iNaturalist-Geo-1k": 368,
    "iNaturalist-Geo-100": 3606,
    "iNaturalist-User-120k": 9275,
}


def figure2(scale: Scale) -> Recipe:
    """Figure 2: how iNaturalist is spread over classes and clients."""
    users = population(scale, "user")
    shown = {**partitionings(scale), users.used: users}
    return Recipe(
        *told(__name__, "figure2"),
        blocks=lambda results: _figure2(results, shown),
        stand_in=stand_in(population(scale, "geo"), users),
    )


def _figure2(results: Results, shown: dict[str, Population]) -> list[Block]:
    counts = {name: label_counts(results.scale, one) for name, one in shown.items()}
    return [
        Curves(
            title="Examples a class",
            caption="The classes in order from most to least examples. The paper's data are "
            "balanced: 100 examples of each of 1,203 classes. Its Figure 2a also has the original "
            "ones, with a long tail, which is not part of the prepared set.",
            lines=[_by_rank(name, c.sum(0)) for name, c in counts.items()],
            x_label="class, by rank",
            y_label="examples",
        ),
        _of_clients(
            counts,
            "classes",
            title="Classes a client",
            caption="How many classes each client has, clients in order from most to least.",
            y_label="classes",
        ),
        _of_clients(
            counts,
            "examples",
            title="Examples a client",
            caption="How many examples each client has, clients in order from most to least.",
            y_label="examples",
        ),
        beside(
            [(name, CLIENTS.get(name), len(c)) for name, c in counts.items()],
            title="How many clients there are",
            caption="The counts in the files that were released are one higher than the paper's, "
            "which leave a row without a place out. The paper does not print that of Geo-1k, which "
            "is also one less than in the file.",
            of="partitioning",
            percent=False,
            digits=0,
        ),
        beside(
            [(name, EMD.get(name), emd(c)) for name, c in counts.items()],
            title="Mean EMD",
            caption="How far clients are from the population, on average by what they hold. The "
            "paper prints that of the users.",
            of="partitioning",
            percent=False,
            digits=2,
        ),
        beside(
            [(name, theirs, None) for name, theirs in ORIGINAL.items()],
            title="How iNaturalist-2017 is balanced (Figure 2a)",
            caption="The paper drops classes with fewer than 100 training images and keeps 100 of "
            "each of the others. `fedlens data prepare` does the same from the metadata.",
            percent=False,
            digits=0,
        ),
    ]


FIGURE3 = {
    "clients": 1262,
    "classes": 2028,
    "training images": 164_172,
    "test images": 19_526,
    "classes with exactly 10 test images": 1835,
}


def figure3(scale: Scale) -> Recipe:
    """Figure 3: how Landmarks-User-160k is spread over classes and users."""
    clients = population(scale, "landmarks")
    return Recipe(
        *told(__name__, "figure3"),
        blocks=lambda results: _figure3(results, clients),
        stand_in=stand_in(clients),
    )


def _figure3(results: Results, clients: Population) -> list[Block]:
    dataset, _, counts = _dealt(results.scale, clients)
    tested = torch.bincount(dataset.test.labels, minlength=dataset.num_classes)  # [L]
    found = (
        *(len(counts), int((counts.sum(0) > 0).sum()), int(counts.sum())),
        *(int(tested.sum()), int((tested == 10).sum())),
    )
    return [
        Curves(
            title="Images a class",
            caption="The classes in order from most to least training images.",
            lines=[_by_rank(clients.used, counts.sum(0))],
            x_label="class, by rank",
            y_label="images",
            log_y=True,
        ),
        _of_clients(
            {clients.used: counts},
            "examples",
            title="Images a client",
            caption="Clients in order from most to least training images.",
            y_label="images",
        ),
        _of_clients(
            {clients.used: counts},
            "classes",
            title="Classes a client",
            caption="Clients in order from most to least classes.",
            y_label="classes",
        ),
        beside(
            [
                (name, theirs, ours)
                for (name, theirs), ours in zip(FIGURE3.items(), found, strict=True)
            ],
            title="How many there are",
            caption=f"Ours is {clients.used}.",
            percent=False,
            digits=0,
            compared=not clients.is_stand_in,
        ),
        beside(
            [(clients.called, EMD[clients.name], emd(counts))],
            title="Mean EMD",
            caption=f"Ours is {clients.used}.",
            percent=False,
            digits=2,
            compared=not clients.is_stand_in,
        ),
    ]


CLASSES = {"cifar10": 10, "cifar100": 100}
IMAGES = 50_000  # training images, equally many per class


def figure10(scale: Scale) -> Recipe:
    """Figure 10: classes a client, for the Dirichlet splits of CIFAR-10 and CIFAR-100."""
    return Recipe(
        *told(__name__, "figure10"),
        blocks=_figure10,
    )


def _figure10(results: Results) -> list[Block]:
    scale = results.scale
    seeds = range(scale.pick(2, 10, 10))
    shown: list[Block] = []
    for name in scale.pick(("cifar10",), tuple(cifar.ALPHAS), tuple(cifar.ALPHAS)):
        splits = {
            alpha: [_split(name, alpha, seed) for seed in seeds] for alpha in cifar.ALPHAS[name]
        }
        shown += [
            Curves(
                title=f"{name}: classes a client",
                caption="Each line is one split; clients in order from most to least classes.",
                lines=[
                    _by_rank(f"α {alpha:g}", (first > 0).sum(1))
                    for alpha, (first, *_) in splits.items()
                ],
                x_label="client, by rank",
                y_label="classes",
            ),
            beside(
                [
                    (
                        f"α {alpha:g}",
                        cifar.EMD[name].get(alpha),
                        Measured.of([emd(c) for c in counts]),
                    )
                    for alpha, counts in splits.items()
                ],
                title=f"{name}: mean EMD",
                caption="Published: of the splits that the authors released. Ours: the mean and "
                f"the standard deviation over {len(seeds)} splits. α is theirs: a class has "
                "concentration α / L, so α = 1 on CIFAR-10 is the Dir(0.1) of others.",
                of="concentration",
                percent=False,
                digits=3,
            ),
        ]
    return shown


def _split(name: str, alpha: float, seed: int) -> Tensor:  # [K, L]
    """The number of examples by client and class in one split of a training set's labels."""
    count = CLASSES[name]
    nothing = torch.zeros(IMAGES, 1, 1, 1, dtype=torch.uint8)
    described = Experiment(
        dataset=Named(name),
        model=Named("linear"),
        rounds=1,
        seed=seed,
        clients=Clients(count=100, partition=Named("dirichlet", {"alpha": alpha})),
    )
    train, split = split_examples(described, Examples(nothing, torch.arange(IMAGES) % count), count)
    held = Federation(train, count, split).everyone(0)
    return held.label_counts(train.labels, count)
