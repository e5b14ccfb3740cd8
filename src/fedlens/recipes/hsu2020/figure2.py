"""Figure 2: how iNaturalist is spread over classes and clients."""

from __future__ import annotations

from fedlens.data.emd import emd
from fedlens.recipes.hsu2020.populations import label_counts, num_classes, num_examples, ranked
from fedlens.recipes.hsu2020.setting import EMD, Population, partitionings, population, stand_in
from fedlens.recipes.page import beside
from fedlens.recipes.recipe import Measured, Recipe, Results, Scale
from fedlens.report.blocks import Block, Curves, Line

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
    users = population(scale, "user")
    shown = {**partitionings(scale), users.used: users}
    return Recipe(
        title="The distribution of iNaturalist",
        about="Classes and examples a client, clients in order of rank, for several partitionings "
        "of one data set; and the examples a class. Nothing is trained.",
        blocks=lambda results: blocks(results, shown),
        stand_in=stand_in(population(scale, "geo"), users),
    )


def blocks(results: Results, shown: dict[str, Population]) -> list[Block]:
    counts = {name: label_counts(results.scale, one) for name, one in shown.items()}
    by_class = {name: c.sum(0).sort(descending=True).values for name, c in counts.items()}
    return [
        Curves(
            title="Examples a class",
            caption="The classes in order from most to least examples. The paper's data are "
            "balanced: 100 examples of each of 1,203 classes. Its Figure 2a also has the original "
            "ones, with a long tail, which is not part of the prepared set.",
            lines=[
                Line(name, range(1, len(values) + 1), values.tolist())
                for name, values in by_class.items()
            ],
            x_label="class, by rank",
            y_label="examples",
        ),
        ranked(
            counts,
            num_classes,
            title="Classes a client",
            caption="How many classes each client has, clients in order from most to least.",
            y_label="classes",
        ),
        ranked(
            counts,
            num_examples,
            title="Examples a client",
            caption="How many examples each client has, clients in order from most to least.",
            y_label="examples",
        ),
        beside(
            [(name, CLIENTS.get(name), Measured(len(c), None, 1)) for name, c in counts.items()],
            title="How many clients there are",
            caption="The counts in the files that were released are one higher than the paper's, "
            "which leave a row without a place out. The paper does not print that of Geo-1k, which "
            "is also one less than in the file.",
            of="partitioning",
            percent=False,
            digits=0,
        ),
        beside(
            [(name, EMD.get(name), Measured(emd(c), None, 1)) for name, c in counts.items()],
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
