"""How many examples of each class clients hold, for the items that train nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from fedlens.config.experiment import Clients, Experiment
from fedlens.core.federation import Dataset, Federation
from fedlens.recipes.hsu2020.setting import Population
from fedlens.recipes.recipe import Scale
from fedlens.report.blocks import Curves, Line
from fedlens.setup import partition
from fedlens.setup.data import split_examples


def label_counts(scale: Scale, clients: Population) -> Tensor:  # [K, L]
    """The number of examples of each class that each client holds."""
    dataset, train, held = partition(described(clients), scale.data)
    return held.label_counts(train.labels, dataset.num_classes)


def draws(dataset: Dataset, clients: Population, seeds: Iterable[int]) -> list[Tensor]:
    """The number of examples by client and class, [K, L], in one split per seed."""
    found = []
    for seed in seeds:
        asked = replace(described(clients), seed=seed)
        train, split = split_examples(asked, dataset.train, dataset.num_classes)
        held = Federation(train, dataset.num_classes, split).everyone(0)
        found.append(held.label_counts(train.labels, dataset.num_classes))
    return found


def counts_of_test(scale: Scale, clients: Population) -> Tensor:  # [L]
    """The number of test examples of each class."""
    dataset, _, _ = partition(described(clients), scale.data)
    return torch.bincount(dataset.test.labels, minlength=dataset.num_classes)


def described(clients: Population) -> Experiment:
    return Experiment(
        dataset=clients.dataset,
        model=clients.model,
        rounds=1,
        clients=Clients(count=clients.count, partition=clients.partition),
    )


def num_classes(counts: Tensor) -> Tensor:
    """The number of classes that each client holds."""
    return (counts > 0).sum(1)


def num_examples(counts: Tensor) -> Tensor:
    return counts.sum(1)


def ranked(
    populations: Mapping[str, Tensor],
    of: Callable[[Tensor], Tensor],
    *,
    title: str,
    caption: str,
    y_label: str,
) -> Curves:
    """A quantity by client, with clients in decreasing order."""
    return Curves(
        title=title,
        caption=caption,
        lines=[_line(name, of(counts)) for name, counts in populations.items()],
        x_label="client, by rank",
        y_label=y_label,
        log_x=True,
        log_y=True,
    )


def _line(name: str, values: Tensor) -> Line:
    ordered = values.sort(descending=True).values
    # A few hundred points show as much as nine thousand, and are drawn much faster.
    at = torch.unique(torch.logspace(0, torch.log10(torch.tensor(len(ordered) + 0.0)), 200).long())
    at = at.clamp(1, len(ordered)).unique()
    return Line(name, at.tolist(), [float(ordered[i - 1]) for i in at.tolist()])
