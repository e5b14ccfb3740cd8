"""Table 1: the training sets, and what centralised learning reaches on them."""

from __future__ import annotations

from fedlens.experiment import Named
from fedlens.recipes.hsu2020 import cifar
from fedlens.recipes.hsu2020.populations import label_counts, num_examples
from fedlens.recipes.hsu2020.setting import (
    OUR_EPOCHS,
    Population,
    centralised,
    population,
    said,
    stand_in,
)
from fedlens.recipes.recipe import Recipe, Results, Scale
from fedlens.report.blocks import Block, Table

PUBLISHED = {  # clients, imbalanced, classes, examples, centralised accuracy in percent
    "CIFAR-10": ("100", "no", 10, 50_000, 86.16),
    "CIFAR-100": ("100", "no", 100, 50_000, 55.21),
    "iNaturalist-Geo-3k": ("135", "yes", 1203, 120_300, 57.90),
    "iNaturalist-User-120k": ("9,275", "yes", 1203, 120_300, 57.90),
    "Landmarks-User-160k": ("1,262", "yes", 2028, 164_172, 67.05),
}


def populations(scale: Scale) -> dict[str, Population]:
    """The populations of the table that there are at this scale."""
    found = {
        name: Population(
            name,
            name,
            Named(scale.dataset(dataset)),
            Named("linear"),
            Named("dirichlet", {"alpha": cifar.ALPHAS[dataset][0]}),
            100,
        )
        for name, dataset in (("CIFAR-10", "cifar10"), ("CIFAR-100", "cifar100"))
    }
    for one in (
        population(scale, "geo"),
        population(scale, "user"),
        population(scale, "landmarks"),
    ):
        found[one.name] = one
    return found


def table1(scale: Scale) -> Recipe:
    shown = populations(scale)
    cells = {"CIFAR-10": cifar.centralised(scale, "cifar10")}
    if scale.name == "paper":
        cells["CIFAR-100"] = cifar.centralised(scale, "cifar100")
    cells |= {
        name: centralised(scale, one) for name, one in shown.items() if not name.startswith("CIFAR")
    }
    return Recipe(
        title="The training sets",
        about="Clients, classes and examples of every data set of the paper, and the accuracy of "
        "centralised training. "
        f"{OUR_EPOCHS}",
        cells=cells,
        seeds=range(scale.pick(1, 1, 3)),
        blocks=lambda results: blocks(results, shown),
        stand_in=" ".join(
            filter(None, (cifar.stand_in(scale), stand_in(*list(shown.values())[2:])))
        ),
    )


def blocks(results: Results, shown: dict[str, Population]) -> list[Block]:
    rows: list[list[str]] = []
    for name, (clients, imbalanced, classes, examples, accuracy) in PUBLISHED.items():
        one = shown[name]
        counts = label_counts(results.scale, one)
        sizes = num_examples(counts)
        reached = results.final(name) if name in results.runs else None
        rows.append(
            [
                name,
                one.dataset.name if not one.is_stand_in else one.used,
                clients,
                f"{len(counts):,}",
                imbalanced,
                "yes" if sizes.max() > sizes.min() else "no",
                f"{classes:,}",
                f"{counts.shape[1]:,}",
                f"{examples:,}",
                f"{int(sizes.sum()):,}",
                f"{accuracy:.2f}",
                said(reached),
            ]
        )
    header = ["data set", "used here"]
    for column in ("clients", "imbalanced", "classes", "examples", "centralised accuracy"):
        header += [f"{column}, published", f"{column}, ours"]
    return [
        Table(
            title="Training sets",
            caption="Published numbers beside those of the data used here. Centralised accuracy in "
            "%.",
            header=header,
            rows=rows,
            published=frozenset(range(2, len(header), 2)),
        )
    ]
