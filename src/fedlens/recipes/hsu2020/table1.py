"""Table 1: the training sets, and what centralised learning reaches on them."""

from __future__ import annotations

from fedlens.config.experiment import Named
from fedlens.recipes.hsu2020 import cifar
from fedlens.recipes.hsu2020.populations import label_counts, num_examples
from fedlens.recipes.hsu2020.setting import (
    NAMES,
    OUR_EPOCHS,
    Population,
    centralised,
    is_other_data,
    population,
    stand_in,
)
from fedlens.recipes.page import mean_of
from fedlens.recipes.recipe import Recipe, Results, Scale
from fedlens.report.blocks import Block, Table
from fedlens.report.numbers import NONE

PUBLISHED = {  # clients, imbalanced, classes, examples, centralised accuracy in percent
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
    for name in PUBLISHED:
        try:
            found[name] = _population(scale, name)
        except ValueError:
            is_last = name == list(PUBLISHED)[-1]
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
    shown = populations(scale)
    cells = {}
    for name, one in shown.items():
        if name not in CIFAR:
            cells[CELLS[name]] = centralised(scale, one)
        elif name == "CIFAR-10" or scale.name == "paper":
            cells[CELLS[name]] = cifar.centralised(scale, CIFAR[name])
    return Recipe(
        title="The training sets",
        about="Clients, classes and examples of every data set of the paper, and the accuracy of "
        "centralised training. "
        f"{OUR_EPOCHS}",
        cells=cells,
        seeds=range(scale.pick(1, 1, 3)),
        blocks=lambda results: blocks(results, shown),
        stand_in=_stand_in(scale, shown),
        other_data=is_other_data(*shown.values()),
    )


def _stand_in(scale: Scale, shown: dict[str, Population]) -> str:
    of_cifar = cifar.stand_in(scale) if CIFAR.keys() & shown else ""
    others = stand_in(*(one for name, one in shown.items() if name not in CIFAR))
    return " ".join(filter(None, (of_cifar, others)))


def blocks(results: Results, shown: dict[str, Population]) -> list[Block]:
    rows: list[list[str]] = []
    for name, one in shown.items():
        clients, imbalanced, classes, examples, accuracy = PUBLISHED[name]
        ours = _held(results.scale, one)
        rows.append(
            [
                name,
                one.dataset.name if not one.is_stand_in else one.used,
                *(clients, ours[0]),
                *(imbalanced, ours[1]),
                *(f"{classes:,}", ours[2]),
                *(f"{examples:,}", ours[3]),
                *(f"{accuracy:.2f}", mean_of(results.final(CELLS[name]), 2, times=100)),
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
    sizes = num_examples(counts)
    imbalanced = "yes" if sizes.max() > sizes.min() else "no"
    return f"{len(counts):,}", imbalanced, f"{counts.shape[1]:,}", f"{int(sizes.sum()):,}"
