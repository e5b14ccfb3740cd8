"""Table 1 and Figures 1, 2, 3 and 10: how classes and examples are spread over clients."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

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
    PUBLISHED,
    Population,
    centralised,
    is_other_data,
    partitionings,
    population,
    stand_in,
)
from fedlens.recipes.page import Ours, beside, mean_of, recipe
from fedlens.recipes.recipe import NUM_CLASSES, Measured, Recipe, Results, Scale
from fedlens.report.blocks import Block, Curves, Heat, Line, Table
from fedlens.report.numbers import NONE
from fedlens.setup import partition
from fedlens.setup.data import split_examples


def label_counts(scale: Scale, clients: Population) -> Tensor:  # [K, L]
    """The number of examples of each class that each client holds."""
    return _dealt(scale, clients)[2]


def _dealt(scale: Scale, clients: Population) -> tuple[Dataset, Holdings, Tensor]:
    """A data set, who holds which of its examples, and the examples of each class by client."""
    dataset, train, held = partition(clients.plain, scale.data)
    return dataset, held, held.label_counts(train.labels, dataset.num_classes)


def _of_clients(counts: Mapping[str, Tensor], what: str) -> Curves:
    """How much each client holds, with clients in decreasing order: `what`, classes or examples."""
    held = {name: (c > 0 if what == "Classes" else c).sum(1) for name, c in counts.items()}
    return Curves(
        title=f"{what} a client",
        lines=[_by_rank(name, values.double(), most=200) for name, values in held.items()],
        x_label="client, by rank",
        y_label=what.lower(),
        log_x=True,
        log_y=True,
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


def _numbers(
    rows: Iterable[tuple[str, float | None, Ours]], title: str, digits: int = 0, **more: Any
) -> Table:
    return beside(rows, title=title, percent=False, digits=digits, **more)


def _about(*clients: Population) -> dict[str, Any]:
    """What a page that trains nothing says of clients, for `page.recipe`."""
    values = {"epochs": OUR_EPOCHS, "used": clients[-1].used}
    return {"also": [stand_in(*clients)], "values": values, "seeds": (1, 1, 1)}


TABLE1 = PUBLISHED["table1"]  # clients, imbalanced, classes, examples, centralised accuracy in %
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
    split = Clients(count=100, partition=Named("dirichlet", {"alpha": cifar.ALPHAS[dataset][0]}))
    used = Named(scale.dataset(dataset))
    return Population(name, name, Experiment(used, Named("linear"), rounds=1, clients=split))


def table1(scale: Scale) -> Recipe:
    """Table 1: the training sets, and what centralised learning reaches on them."""
    shown = populations(scale)
    cells = {}
    for name, one in shown.items():
        if name not in CIFAR:
            cells[CELLS[name]] = centralised(scale, one)
        elif name == "CIFAR-10" or scale.name == "paper":
            cells[CELLS[name]] = cifar.centralised(scale, CIFAR[name])

    def blocks(results: Results) -> list[Block]:
        header, rows = ["data set", "used here"], list[list[str]]()
        for column in ("clients", "imbalanced", "classes", "examples", "centralised accuracy"):
            header += [f"{column}, published", f"{column}, ours"]
        for name, one in shown.items():
            clients, imbalanced, classes, examples, accuracy = TABLE1[name]
            theirs = clients, imbalanced, f"{classes:,}", f"{examples:,}", f"{accuracy:.2f}"
            ours = *_held(scale, one), mean_of(results.final(CELLS[name]))
            rows.append([name, one.used if one.is_stand_in else one.plain.dataset.name])
            rows[-1] += itertools.chain(*zip(theirs, ours, strict=True))
        missing = "– stands for what would take data that are not here, or was not run."
        return [
            Table(
                title="Training sets",
                caption=missing * any(NONE in row for row in rows),
                header=header,
                rows=rows,
                published=frozenset(range(2, len(header), 2)),
            )
        ]

    others = [one for name, one in shown.items() if name not in CIFAR]
    more: dict[str, Any] = {"cells": cells, "other_data": is_other_data(*shown.values())}
    more |= cifar.said(scale) if len(others) < len(shown) else {}
    more["also"] = [*more.get("also", ()), stand_in(*others)]
    values = {"epochs": OUR_EPOCHS, "used": ""}
    return recipe(__name__, scale, "table1", blocks, values=values, **more)


def _held(scale: Scale, one: Population) -> tuple[str, str, str, str]:
    """Clients, whether they are imbalanced, classes and examples, if the data are available."""
    if not scale.holds(one.plain.dataset.name):
        return NONE, NONE, NONE, NONE
    counts = label_counts(scale, one)
    sizes = counts.sum(1)
    imbalanced = "yes" if sizes.max() > sizes.min() else "no"
    return f"{len(counts):,}", imbalanced, f"{counts.shape[1]:,}", f"{int(sizes.sum()):,}"


def figure1(scale: Scale) -> Recipe:
    """Figure 1: classes are not everywhere alike."""
    clients = population(scale, "geo")

    def blocks(results: Results) -> list[Block]:
        dataset, held, counts = _dealt(scale, clients)
        shares = counts.T / counts.sum(0).clamp(min=1)[:, None]  # [L, K] of each class by client
        one, two = furthest_apart(shares)
        order = (shares[one] - shares[two]).argsort(descending=True)
        names = held.names or [str(k) for k in range(len(counts))]
        classes = [dataset.classes[one], dataset.classes[two]]
        apart = float((shares[one] - shares[two]).abs().sum())
        return [
            Heat(
                title="Two classes over the clients",
                values=[shares[label][order].tolist() for label in (one, two)],
                row_names=classes,
                column_names=[names[k] for k in order.tolist()],
                row_label="class",
                column_label="client",
                value_label="share of the class",
                percent=True,
                shares=True,
            ),
            Table(
                title="How far apart they are",
                header=("classes", "distance"),
                rows=[[" and ".join(classes), f"{apart:.2f}"]],
            ),
        ]

    return recipe(__name__, scale, "figure1", blocks, **_about(clients))


def furthest_apart(shares: Tensor) -> tuple[int, int]:
    """The two rows of `shares` [L, K] with the largest L1 distance; the first of equals."""
    distances = torch.cdist(shares.double(), shares.double(), p=1)  # [L, L]
    place = int(distances.argmax())
    return place // len(shares), place % len(shares)


def figure2(scale: Scale) -> Recipe:
    """Figure 2: how iNaturalist is spread over classes and clients."""
    users, places = population(scale, "user"), population(scale, "geo")

    def blocks(results: Results) -> list[Block]:
        shown = {**partitionings(scale), users.used: users}
        counts = {name: label_counts(scale, one) for name, one in shown.items()}
        there = PUBLISHED["figure2-clients"]
        original = [(name, theirs, None) for name, theirs in PUBLISHED["figure2-original"].items()]
        return [
            Curves(
                title="Examples a class",
                lines=[_by_rank(name, c.sum(0)) for name, c in counts.items()],
                x_label="class, by rank",
                y_label="examples",
            ),
            _of_clients(counts, "Classes"),
            _of_clients(counts, "Examples"),
            _numbers(
                [(name, there.get(name), len(c)) for name, c in counts.items()],
                "How many clients there are",
                of="partitioning",
            ),
            _numbers(
                [(name, EMD.get(name), emd(c)) for name, c in counts.items()],
                "Mean EMD",
                digits=2,
                of="partitioning",
            ),
            _numbers(original, "How iNaturalist-2017 is balanced (Figure 2a)"),
        ]

    return recipe(__name__, scale, "figure2", blocks, **_about(places, users))


FIGURE3 = PUBLISHED["figure3"]


def figure3(scale: Scale) -> Recipe:
    """Figure 3: how Landmarks-User-160k is spread over classes and users."""
    clients = population(scale, "landmarks")

    def blocks(results: Results) -> list[Block]:
        dataset, _, counts = _dealt(scale, clients)
        tested = torch.bincount(dataset.test.labels, minlength=dataset.num_classes)  # [L]
        found = (
            *(len(counts), int((counts.sum(0) > 0).sum()), int(counts.sum())),
            *(int(tested.sum()), int((tested == 10).sum())),
        )
        there = [(name, n, ours) for (name, n), ours in zip(FIGURE3.items(), found, strict=True)]
        distance = [(clients.called, EMD[clients.name], emd(counts))]
        compared = not clients.is_stand_in
        return [
            Curves(
                title="Images a class",
                lines=[_by_rank(clients.used, counts.sum(0))],
                x_label="class, by rank",
                y_label="images",
                log_y=True,
            ),
            _of_clients({clients.used: counts}, "Images"),
            _of_clients({clients.used: counts}, "Classes"),
            _numbers(there, "How many there are", compared=compared),
            _numbers(distance, "Mean EMD", digits=2, compared=compared),
        ]

    return recipe(__name__, scale, "figure3", blocks, **_about(clients))


IMAGES = 50_000  # training images, equally many per class


def figure10(scale: Scale) -> Recipe:
    """Figure 10: classes a client, for the Dirichlet splits of CIFAR-10 and CIFAR-100."""
    seeds = range(scale.pick(2, 10, 10))

    def blocks(results: Results) -> list[Block]:
        shown: list[Block] = []
        for name in scale.pick(("cifar10",), tuple(cifar.ALPHAS), tuple(cifar.ALPHAS)):
            splits = {a: [_split(name, a, seed) for seed in seeds] for a in cifar.ALPHAS[name]}
            emds = {a: Measured.of([emd(c) for c in counts]) for a, counts in splits.items()}
            first = {f"α {a:g}": (counts[0] > 0).sum(1) for a, counts in splits.items()}
            shown += [
                Curves(
                    title=f"{name}: classes a client",
                    lines=[_by_rank(line, classes) for line, classes in first.items()],
                    x_label="client, by rank",
                    y_label="classes",
                ),
                _numbers(
                    [(f"α {a:g}", cifar.published_emd(name, a), ours) for a, ours in emds.items()],
                    f"{name}: mean EMD",
                    digits=3,
                    caption="Published: of the splits that the authors released. Ours: the mean "
                    f"and the standard deviation over {len(seeds)} splits. α is theirs: a class "
                    "has concentration α / L, so α = 1 on CIFAR-10 is the Dir(0.1) of others.",
                    of="concentration",
                ),
            ]
        return shown

    return recipe(__name__, scale, "figure10", blocks, seeds=(1, 1, 1))


def _split(name: str, alpha: float, seed: int) -> Tensor:  # [K, L]
    """The number of examples by client and class in one split of a training set's labels."""
    count = NUM_CLASSES[name]
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
