"""Find published data sets on this machine, and load them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from fedlens.core.federation import Dataset, Examples
from fedlens.data import idx
from fedlens.data.catalogue import (
    CIFAR10,
    CIFAR100,
    CIFAR100_COARSE,
    FASHION_MNIST,
    MNIST,
    PUBLISHED,
    Form,
    Published,
)
from fedlens.data.places import Source, roots
from fedlens.storage.reading import BadFile, reading


class Found(NamedTuple):
    """A folder that holds all or some of the files of a set."""

    folder: Path
    form: Form
    missing: tuple[str, ...]


def find(entry: Published, places: Sequence[Path]) -> Found | None:
    """The first folder that holds a whole set, else the first that holds some of its files."""
    partly = None
    for root in places:
        for form in entry.forms:
            for folder in (*(root / name for name in form.folders), root):
                missing = tuple(name for name in form.files if not (folder / name).is_file())
                if len(missing) == len(form.files) or _is_another(entry, form, folder):
                    continue
                found = Found(folder, form, missing)
                if not missing:
                    return found
                partly = partly or found
    return partly


def _is_another(entry: Published, form: Form, folder: Path) -> bool:
    """Whether the files are another set's: MNIST and Fashion-MNIST use the same file names."""
    others = {e.first_test_labels for e in PUBLISHED.values() if e.name != entry.name} - {()}
    names = [name for name in form.files if name.startswith("t10k-labels")]
    try:
        return any(idx.first_labels(folder / name, 10) in others for name in names)
    except ValueError:
        return False  # an unreadable file is reported when it is loaded


def located(entry: Published, source: Source) -> Found:
    """The folder of a whole set; raises a ValueError that lists the searched folders."""
    found = find(entry, roots(source))
    if found is None:
        raise not_found(entry, source)
    if found.missing:
        lost = found.folder / found.missing[0]
        raise ValueError(f"{entry.name} is incomplete, {lost} is missing: {_remedy(entry.name)}")
    return found


def not_found(entry: Published, source: Source) -> ValueError:
    looked = ", ".join(str(place) for place in roots(source))
    return ValueError(f"{entry.name} is not in {looked}: {_remedy(entry.name)}")


def _remedy(name: str) -> str:
    return (
        f"fetch it with `fedlens data get {name}`, take files you have with "
        f"`fedlens data get {name} --from PATH`, or set FEDLENS_DATA to their folder"
    )


def load(entry: Published, source: Source) -> Dataset:
    """Load a published set from its files on this machine."""
    folder, form, _ = located(entry, source)
    try:
        train, test = form.read(folder)
    except BadFile as error:
        raise ValueError(
            f"{error.file} is damaged ({error.why}): remove it, then fetch it again with "
            f"`fedlens data get {entry.name}`"
        ) from error
    with reading(folder, f"fetch it again with `fedlens data get {entry.name}`"):
        return Dataset(entry.name, train, test, entry.classes, entry.mean, entry.std)


def fashion_mnist(source: Source) -> Dataset:
    """Fashion-MNIST: 70,000 gray images of clothes, 28×28, 10 classes."""
    return load(FASHION_MNIST, source)


def mnist(source: Source) -> Dataset:
    """MNIST: 70,000 gray images of handwritten digits, 28×28, 10 classes."""
    return load(MNIST, source)


def cifar10(source: Source) -> Dataset:
    """CIFAR-10: 60,000 colour images, 32×32, 10 classes."""
    return load(CIFAR10, source)


def cifar100(source: Source, *, labels: Literal["fine", "coarse"] = "fine") -> Dataset:
    """CIFAR-100: 60,000 colour images, 32×32, 100 fine or 20 coarse classes."""
    dataset = load(CIFAR100, source)
    if labels == "fine":
        return dataset

    def coarse(part: Examples) -> Examples:
        return replace(part, labels=torch.from_numpy(part.columns["coarse"].astype("int64")))

    train, test = coarse(dataset.train), coarse(dataset.test)
    return replace(dataset, train=train, test=test, classes=CIFAR100_COARSE)
