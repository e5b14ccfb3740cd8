"""Figure 1: classes are not everywhere alike."""

from __future__ import annotations

import torch
from torch import Tensor

from fedlens.recipes.hsu2020.populations import described
from fedlens.recipes.hsu2020.setting import Population, population, stand_in
from fedlens.recipes.recipe import Recipe, Results, Scale
from fedlens.report.blocks import Block, Heat, Table
from fedlens.setup import partition


def figure1(scale: Scale) -> Recipe:
    clients = population(scale, "geo")
    return Recipe(
        title="Where classes are",
        about="The paper maps the sightings of two species of iNaturalist, Douglas-fir and red "
        "maple, over the United States: visual categories vary with location. Here are the two "
        "classes that are furthest apart, over the clients of the partition by place. Nothing is "
        "trained.",
        blocks=lambda results: blocks(results, clients),
        stand_in=stand_in(clients),
    )


def blocks(results: Results, clients: Population) -> list[Block]:
    dataset, train, held = partition(described(clients), results.scale.data)
    counts = held.label_counts(train.labels, dataset.num_classes)  # [K, L]
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
