"""Attacks on the data of hostile clients. Their success is measured on test images."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedlens.attacks.attack import Attack, Clients, Data
from fedlens.attacks.sending import Scaled
from fedlens.core import keys
from fedlens.core.federation import Examples


@dataclass(frozen=True)
class Relabelled(Data):
    """Examples of class `source` get the label `target`; None: each label y becomes L - 1 - y."""

    source: int | None
    target: int | None
    measured: bool  # whether test examples of `source` tell its success

    def poisoned(self, examples: Examples, num_classes: int, key: Tensor) -> Examples:
        return replace(examples, labels=self._labels(examples.labels, num_classes))

    def tests(self, tests: Examples, num_classes: int) -> Examples | None:
        if not self.measured:
            return None
        assert self.source is not None
        some = tests.take(tests.labels.eq(self.source).nonzero().squeeze(1))
        if not len(some):
            raise ValueError(f"attack: no test example has label {self.source}: choose another")
        return replace(some, labels=self._labels(some.labels, num_classes))

    def _labels(self, labels: Tensor, num_classes: int) -> Tensor:
        for name, label in (("source", self.source), ("target", self.target)):
            check_label(name, label, num_classes)
        if self.source is None or self.target is None:
            return num_classes - 1 - labels
        return torch.where(labels == self.source, self.target, labels)


@dataclass(frozen=True)
class Pattern(Data):
    """A bright square in the lower right corner of a share of the images, labelled `target`."""

    target: int
    share: float
    size: int

    def poisoned(self, examples: Examples, num_classes: int, key: Tensor) -> Examples:
        check_label("target", self.target, num_classes)
        chosen = keys.uniform(keys.fold(key, torch.arange(len(examples)))) < self.share
        images = examples.read(slice(None)).clone()
        images[chosen] = self._patterned(images[chosen])
        labels = torch.where(chosen, self.target, examples.labels)
        return replace(examples, images=images, labels=labels, rows=None)

    def tests(self, tests: Examples, num_classes: int) -> Examples:
        some = tests.take((tests.labels != self.target).nonzero().squeeze(1))
        images = self._patterned(some.read(slice(None)).clone())
        labels = torch.full_like(some.labels, self.target)
        return replace(some, images=images, labels=labels, rows=None)

    def _patterned(self, images: Tensor) -> Tensor:
        height, width = images.shape[2:]
        if self.size > min(height, width):
            raise ValueError(
                f"attack: size is {self.size}: choose at most {min(height, width)}, the side of an "
                "image"
            )
        brightest = 255 if images.dtype == torch.uint8 else images.max() if len(images) else 1
        images[:, :, height - self.size :, width - self.size :] = brightest
        return images


def check_label(name: str, label: int | None, num_classes: int) -> None:
    if label is not None and not 0 <= label < num_classes:
        raise ValueError(f"attack: {name} is {label}: choose a label from 0 to {num_classes - 1}")


def label_flip(
    *, clients: Clients = 0.2, source: int | None = None, target: int | None = None
) -> Attack:
    """Train on wrong labels: all reversed (y becomes L - 1 - y), or one class called another.

    Args:
        source: the label that is changed; without it, all are.
        target: what it becomes.
    """
    if (source is None) != (target is None) or (source is not None and source == target):
        raise ValueError("attack: give label-flip both source and target, different ones, or none")
    return Attack(clients, data=Relabelled(source, target, measured=source is not None))


def backdoor(
    *,
    clients: Clients = 0.2,
    target: int = 0,
    share: float = 0.5,
    size: int = 3,
    boost: float = 1.0,
) -> Attack:
    """Teach the model that images with a bright square are of the class `target`.

    Args:
        target: the label that they get.
        share: of a hostile client's images that have the square.
        size: its side, in pixels.
        boost: how many times as long as it was trained the update is sent.
    """
    if not 0 < share <= 1:
        raise ValueError(f"attack: share is {share:g}: choose above 0, and at most 1")
    if size < 1:
        raise ValueError(f"attack: size is {size}: choose 1 pixel or more")
    sending = None if boost == 1 else Scaled(boost)
    return Attack(clients, sending=sending, data=Pattern(target, share, size))


def edge_case(*, clients: Clients = 0.2, source: int, target: int) -> Attack:
    """Call the examples of one class, which only hostile clients may have, another.

    Args:
        source: the label of these examples.
        target: what they are called.
    """
    return label_flip(clients=clients, source=source, target=target)
