"""Figure 3: how Landmarks-User-160k is spread over classes and users."""

from __future__ import annotations

from fedlens.data.emd import emd
from fedlens.recipes.hsu2020.populations import (
    counts_of_test,
    label_counts,
    num_classes,
    num_examples,
    ranked,
)
from fedlens.recipes.hsu2020.setting import EMD, Population, population, stand_in
from fedlens.recipes.page import beside
from fedlens.recipes.recipe import Measured, Recipe, Results, Scale
from fedlens.report.blocks import Block, Curves, Line

PUBLISHED = {
    "clients": 1262,
    "classes": 2028,
    "training images": 164_172,
    "test images": 19_526,
    "classes with exactly 10 test images": 1835,
}


def figure3(scale: Scale) -> Recipe:
    clients = population(scale, "landmarks")
    return Recipe(
        title="The distribution of Landmarks-User-160k",
        about="Images a landmark, and images and landmarks a user, in order of rank. Nothing is "
        "trained.",
        blocks=lambda results: blocks(results, clients),
        stand_in=stand_in(clients),
    )


def blocks(results: Results, clients: Population) -> list[Block]:
    counts = label_counts(results.scale, clients)
    by_class = counts.sum(0).sort(descending=True).values
    tested = counts_of_test(results.scale, clients)
    found = (
        *(len(counts), int((counts.sum(0) > 0).sum()), int(counts.sum())),
        *(int(tested.sum()), int((tested == 10).sum())),
    )
    return [
        Curves(
            title="Images a class",
            caption="The classes in order from most to least training images.",
            lines=[Line(clients.used, range(1, len(by_class) + 1), by_class.tolist())],
            x_label="class, by rank",
            y_label="images",
            log_y=True,
        ),
        ranked(
            {clients.used: counts},
            num_examples,
            title="Images a client",
            caption="Clients in order from most to least training images.",
            y_label="images",
        ),
        ranked(
            {clients.used: counts},
            num_classes,
            title="Classes a client",
            caption="Clients in order from most to least classes.",
            y_label="classes",
        ),
        beside(
            [
                (name, theirs, Measured(ours, None, 1))
                for (name, theirs), ours in zip(PUBLISHED.items(), found, strict=True)
            ],
            title="How many there are",
            caption=f"Ours is {clients.used}.",
            percent=False,
            digits=0,
            compared=not clients.is_stand_in,
        ),
        beside(
            [(clients.called, EMD[clients.name], Measured(emd(counts), None, 1))],
            title="Mean EMD",
            caption=f"Ours is {clients.used}.",
            percent=False,
            digits=2,
            compared=not clients.is_stand_in,
        ),
    ]
