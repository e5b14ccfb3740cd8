"""The data set of an experiment, and how it is split over the clients."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedlens.attacks import Attack, hostile_key
from fedlens.config.experiment import Experiment, Named
from fedlens.config.names import DATASETS
from fedlens.config.options import call, expect
from fedlens.core import keys
from fedlens.core.federation import Dataset, Examples, Fixed, Holdings, Pool, Split, offsets_of
from fedlens.data.map_style import MapStyle, map_style
from fedlens.data.partitions import natural_column
from fedlens.data.partitions.altered import Altered
from fedlens.data.partitions.dealing import NOBODY, apply_partition, holdings
from fedlens.data.places import Counted, Source, existing
from fedlens.engines.ray import OnDisk
from fedlens.setup.labels import check_labels

logger = logging.getLogger(__name__)


class ClientTests(NamedTuple):
    """The examples that each client is tested on."""

    part: Literal["train", "test"]  # the part of the data set they are from
    holdings: Holdings  # positions in the examples of that part


def check_finite(dataset: Dataset) -> None:
    """Refuse float images with NaN or infinite pixels: their first round would diverge."""
    for part in dataset.parts:
        if part.images.is_floating_point():
            for first in range(0, len(part), 1000):
                if not part.read(slice(first, first + 1000)).isfinite().all():
                    raise ValueError(
                        f"{dataset.name}: some images have pixels that are not finite (NaN or "
                        "infinite): leave these images out, or correct what made them"
                    )


def load_dataset(
    given: Named | Dataset, data: Path | None, watch: Counted | None = None
) -> Dataset:
    data = existing(data)
    made = given if isinstance(given, Dataset) else _loaded(given, Source(data, watch=watch))
    for name in made.classes:
        if not name.isascii() and name.encode(errors="ignore").decode() != name:
            raise ValueError(f"the class {name!r} of {made.name} is not text: give it another name")
    return made


def dataset_of(experiment: Experiment, data: Path | None, watch: Counted | None = None) -> Dataset:
    """The data set of an experiment, which fits its images' labels."""
    dataset = load_dataset(experiment.dataset, data, watch)
    check_labels(experiment, dataset)
    return dataset


def _loaded(given: Named, source: Source) -> Dataset:
    """Load a data set. Its function may return torchvision-style ones: train, or train and test."""
    found = call(DATASETS.find(given.name), source, options=given.options)
    if isinstance(found, Dataset):
        return found
    parts = found if isinstance(found, tuple) else (found,)
    if len(parts) in (1, 2) and all(isinstance(part, MapStyle) for part in parts):
        return map_style(*parts, name=given.name.rpartition(":")[2], watch=source.watch)
    return expect(found, Dataset, f"dataset {given.name!r}")


def on_disk(dataset: Dataset, given: Named | Dataset, data: Path | None) -> OnDisk | None:
    """How other machines open images that are memory-mapped here, and too many to be sent."""
    if not dataset.is_mapped or isinstance(given, Dataset):
        return None
    images = dataset.train.images, dataset.test.images
    return OnDisk(images, partial(_images, given, data))


def _images(given: Named, data: Path | None) -> Sequence[Tensor]:
    dataset = load_dataset(given, data)
    return dataset.train.images, dataset.test.images


def split_seed(experiment: Experiment) -> int:
    own = experiment.clients.seed
    return experiment.seed if own is None else own


def with_validation(dataset: Dataset, experiment: Experiment) -> tuple[Examples, Examples | None]:
    """The training and, if requested, validation examples: the data set's, else from training."""
    if "validation" not in experiment.evaluate.on:
        return dataset.train, None
    if dataset.validation is not None:
        return dataset.train, dataset.validation
    return _set_apart(dataset.train, experiment)


def _set_apart(train: Examples, experiment: Experiment) -> tuple[Examples, Examples]:
    """The training examples without a share that the seed selects, and that share."""
    key = keys.fold(keys.root(split_seed(experiment)), keys.purpose("validation"))
    order = keys.fold(key, torch.arange(len(train))).argsort(stable=True)
    order, middle = _by_patient(order, train.patients[order])
    count = max(int(len(train) * experiment.evaluate.validation), 1)
    chosen = middle < count if bool((middle < count).any()) else middle == middle[0]
    apart, rest = order[chosen].sort().values, order[~chosen].sort().values
    if not len(rest):
        raise ValueError(
            "all training examples are of one patient, which leaves none for validation: leave "
            "validation out of evaluate.on"
        )
    return train.take(rest), train.take(apart)


def _by_patient(order: Tensor, patients: Tensor) -> tuple[Tensor, Tensor]:
    """An order of examples with those of a patient together, at the first of them.

    Also returns the middle of the patient's places, for each place.
    """
    counted = np.unique(patients.numpy(), return_inverse=True, return_counts=True)
    number, sizes = (torch.from_numpy(found) for found in counted[1:])
    place = torch.arange(len(order))
    first = torch.full((len(sizes),), len(order)).scatter_reduce(0, number, place, "amin")
    again = first[number].argsort(stable=True)
    number = number[again]
    starts = torch.full((len(sizes),), len(order)).scatter_reduce(0, number, place, "amin")
    return order[again], starts[number] + sizes[number] / 2


class OtherClients(ValueError):
    """A partition made another number of clients than requested; `ask` says how to request it."""

    def __init__(self, what: str, found: int, ask: str = "set clients.count to") -> None:
        super().__init__(
            f"{what} made {found} clients: {ask} {found}, or choose a clients.partition that "
            "deals examples to as many as you like"
        )
        self.what, self.found = what, found


def split_examples(
    experiment: Experiment, train: Examples, num_classes: int
) -> tuple[Examples, Split]:
    """The training examples as clients see them, and how they are divided among the clients."""
    if not len(train):
        raise ValueError(
            "there are no images to train on here: sites of a fleet have theirs, so start its "
            "server with `fedlens fleet serve`, or choose another dataset"
        )
    clients = experiment.clients
    named = clients.partition
    rng = np.random.default_rng([split_seed(experiment), keys.purpose("partition")])
    pool = Pool(train, num_classes, clients.count or 0, rng)
    made = apply_partition(named.name, named.options, pool)
    what = f"partition {named.name!r}"
    if isinstance(made, Altered):
        train, made = made.examples, made.held
    split = made if isinstance(made, Split) else Fixed(expect(made, Holdings, what))
    if ":" in named.name and isinstance(split, Fixed):
        _check_held(split.everyone, len(train), what)
    if clients.count not in (None, split.num_clients):
        raise OtherClients(what, split.num_clients)
    if clients.holdout and not isinstance(split, Fixed):
        raise ValueError(
            f"clients.holdout is {clients.holdout}, but what a client of {what} would be tested "
            "on, others may train on: leave clients.holdout out"
        )
    return train, split


def poisoned(
    attack: Attack, train: Examples, split: Split, num_classes: int, seed: int
) -> Examples:
    """The training examples after an attack on the data of hostile clients."""
    attack.count(split.num_clients)  # refuses too many
    if attack.data is None:
        return train
    if not isinstance(split, Fixed):
        raise ValueError(
            "attack: who holds an example changes from round to round: choose a clients.partition "
            "that gives each example to one client"
        )
    key = hostile_key(seed)
    images, labels = train.images, train.labels.clone()
    for client in attack.hostile(split.num_clients, key).nonzero().squeeze(1).tolist():
        members = split.everyone.members(client)
        own = train.take(members)
        made = attack.data.poisoned(own, num_classes, keys.fold(key, client))
        labels[members] = made.labels
        if made.images is not own.images:
            if images is train.images:
                images = train.read(slice(None)).clone(memory_format=torch.preserve_format)
            images[members] = made.images
    if images is train.images and torch.equal(labels, train.labels):
        logger.warning("attack: hostile clients hold no example that it changes")
    rows = train.rows if images is train.images else None
    return replace(train, images=images, labels=labels, rows=rows)


def _check_held(held: Holdings, num_examples: int, what: str) -> None:
    """Raise an error for an invalid split of the user's own."""
    if held.index.numel() == 0:
        raise ValueError(f"{what} gives nobody an example: fix it")
    low, high = int(held.index.min()), int(held.index.max())
    if low < 0 or high >= num_examples:
        wrong = low if low < 0 else high
        raise ValueError(
            f"{what} gives somebody example {wrong}, but they are 0 to {num_examples - 1}: fix it"
        )
    times = torch.bincount(held.index, minlength=num_examples)
    if int(times.max()) > 1:
        raise ValueError(
            f"{what} gives example {int(times.argmax())} to {int(times.max())} clients, or twice "
            "to one: an example has one holder, or none"
        )


def divided(
    everyone: Holdings, share: float, seed: int, clients: Tensor, patients: Tensor | None = None
) -> tuple[Holdings, Holdings]:
    """The holdings of these clients without a share that the seed selects, and that share.

    Of the examples of one of the `patients` [N] a client has all in one of them.
    """
    own = keys.fold(keys.root(seed, keys.purpose("holdout")), clients)
    order = torch.from_numpy(keys.shuffle_segments(everyone.offsets.numpy(), own.numpy()))
    place = torch.arange(len(order)) + 0.5
    if patients is not None:
        whose = patients[everyone.index[order]]
        order, place = _by_patient(order, everyone.owners * (int(whose.max()) + 1) + whose)
    apart = (everyone.sizes * share).long()
    tested = place - everyone.offsets[everyone.owners] < apart[everyone.owners]
    index = everyone.index[order]

    def chosen(mask: torch.Tensor) -> Holdings:
        sizes = torch.bincount(everyone.owners[mask], minlength=len(everyone))
        return Holdings(index[mask], offsets_of(sizes), everyone.names)

    return chosen(~tested), chosen(tested)


def own_tests(experiment: Experiment, test: Examples, split: Split) -> ClientTests | None:
    """The test examples of each client, if a column of the data set says whose they are."""
    named = experiment.clients.partition
    column = natural_column(named.name, named.options)
    if column is None or column not in test.columns or "test" not in experiment.evaluate.on:
        return None
    if not isinstance(split, Fixed) or split.everyone.names is None:  # one client has all: a twin
        return None
    number = {name: client for client, name in enumerate(split.everyone.names)}
    owners = [number.get(str(value), NOBODY) for value in test.columns[column].tolist()]
    held = holdings(np.array(owners, np.int64), len(number))
    return ClientTests("test", replace(held, names=split.everyone.names))
