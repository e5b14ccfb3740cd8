"""Images and labels, and which client holds which of them.

Shapes are written as trailing comments: K clients, C the cohort, L labels, N examples, n examples
held.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from fedlens.core.label_sets import MOST, packed, unpacked
from fedlens.core.trees import bytes_of
from fedlens.storage.reading import demand_text

MOST_DESCRIBED = 10_000  # clients whose holdings a run lists one by one
PATIENT = "patient"  # the column whose examples of one value are trained on, or tested on, together
AT_ONCE = 1024  # clients whose holdings are read together, if those of all are needed


@dataclass(frozen=True)
class Examples:
    """Images and their labels, and columns with other facts about each (its client, its place).

    Parts of a set share its images: `rows` then lists the positions of their own. Images are read
    by `read`. Labels may be given as [N, L], 1 for each label that an image has and 0 for the
    others: they are kept as one number an image (`label_sets`), with `multi_label`.
    """

    images: Tensor  #: [N, channels, H, W] uint8, or floats that are used as they are
    labels: Tensor  #: [N] int64
    columns: Mapping[str, np.ndarray[Any, Any]] = field(default_factory=dict)  #: [N] each
    rows: Tensor | None = None  #: [N] positions in `images`; None: 0 to N - 1
    multi_label: bool = False  #: an image may have several labels, or none

    def __post_init__(self) -> None:
        for what, given in (("images", self.images), ("labels", self.labels)):
            if not isinstance(given, Tensor):
                raise ValueError(
                    f"{what} are a {type(given).__name__}: give a tensor, "
                    f"as torch.as_tensor({what}) makes one"
                )
        if self.images.ndim != 4:
            shape = tuple(self.images.shape)
            raise ValueError(f"images are {shape}: give [N, channels, height, width]")
        num_images = len(self.images if self.rows is None else self.rows)
        if num_images != len(self.labels):
            raise ValueError(
                f"{num_images} images but {len(self.labels)} labels: give one an image"
            )
        many = self.labels.ndim == 2 and self.labels.shape[1] <= MOST
        if many and bool(((self.labels == 0) | (self.labels == 1)).all()):
            object.__setattr__(self, "labels", packed(self.labels))
            object.__setattr__(self, "multi_label", True)
        if self.labels.is_floating_point() or self.labels.ndim != 1:
            got = f"{self.labels.dtype} of shape {tuple(self.labels.shape)}"
            raise ValueError(
                f"labels are {got}: give one whole number an image, or rows of 0 and 1 if it may "
                f"have several labels, of {MOST} at most"
            )
        if self.labels.dtype is not torch.int64:
            object.__setattr__(self, "labels", self.labels.to(torch.int64))

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, which: Tensor | slice) -> Tensor:
        """The images of some examples: a copy, except for a slice of a set without `rows`."""
        return self.images[which if self.rows is None else self.rows[which]]

    def wanted(self, which: Tensor | slice, num_labels: int) -> Tensor:  # [n], or [n, L]
        """What a model should say of some examples: a label, or 0 or 1 for each of several."""
        labels = self.labels[which]
        return unpacked(labels, num_labels) if self.multi_label else labels

    @property
    def patients(self) -> Tensor:  # [N]
        """The number of each example's patient, or of the example itself where none is known."""
        if PATIENT not in self.columns:
            return torch.arange(len(self))
        patients = self.columns[PATIENT].astype(str)
        number = torch.from_numpy(np.unique(patients, return_inverse=True)[1])
        unknown = torch.from_numpy(patients == "")
        return torch.where(unknown, len(self) + torch.arange(len(self)), number)

    def contents(self) -> Iterator[bytes | memoryview]:
        """The bytes of all images and labels in chunks, after shape and dtype: for a digest."""
        shape = tuple(self.images.shape[1:])
        yield repr((len(self), shape, self.images.dtype)).encode()
        for start in range(0, len(self), DIGESTED):
            some = slice(start, start + DIGESTED)
            for tensor in (self.read(some), self.labels[some]):
                yield bytes_of(tensor)

    def take(self, index: Tensor) -> Examples:
        """Some of the examples; they share the images of the whole set."""
        columns = {name: column[index.numpy()] for name, column in self.columns.items()}
        rows = index if self.rows is None else self.rows[index]
        return replace(self, labels=self.labels[index], columns=columns, rows=rows)

    def to(self, device: torch.device, images: Tensor | None = None) -> Examples:
        """The same examples on a device; `images` are given if they are there already."""
        rows = None if self.rows is None else self.rows.to(device)
        images = self.images.to(device) if images is None else images
        return replace(self, images=images, labels=self.labels.to(device), rows=rows)


NAME = "name them, in the order of their labels"
DIGESTED = 1024  # examples per chunk: larger ones would copy a memory-mapped set into memory


class LeftOut(NamedTuple):
    """A file that was left out of a data set."""

    file: str
    why: str


Fit = Literal["stretch", "crop", "letterbox"]
"""How an image gets the shape of a set: distorted, cut to its middle, or between black bars."""

COLOURS = 1, 3, 4  # channels that pictures have


@dataclass(frozen=True)
class Dataset:
    """Training examples, test examples, and the names of the classes."""

    name: str
    train: Examples
    test: Examples
    classes: tuple[str, ...]  #: L names
    mean: tuple[float, ...] | None = None  #: per channel, of images scaled to [0, 1]
    std: tuple[float, ...] | None = None
    left_out: tuple[LeftOut, ...] = ()  #: files that could not be decoded
    is_mapped: bool = False  #: its images are a memory-mapped file, maybe larger than memory
    validation: Examples | None = None  #: its own; None: a share of train is set apart
    fit: Fit = "stretch"  #: how its images, and those of predictions, get their shape

    def __post_init__(self) -> None:
        if isinstance(self.classes, str) or not isinstance(self.classes, Sequence):
            raise ValueError(
                f"{self.name}: classes are {self.classes!r}: give their names in a list"
            )
        for part in self.parts:
            if not isinstance(part, Examples):
                raise ValueError(
                    f"{self.name}: examples are a {type(part).__name__}: give train and test as "
                    "fl.Examples(images, labels)"
                )
            if not len(part):
                continue
            low, high = int(part.labels.min()), int(part.labels.max())
            if part.multi_label:
                if not high.bit_length() <= self.num_classes <= MOST:
                    raise ValueError(
                        f"{self.name}: images have {high.bit_length()} labels and these "
                        f"{self.num_classes} names: give each a name, and {MOST} at most"
                    )
            elif not 0 <= low <= high < self.num_classes:
                raise ValueError(
                    f"{self.name}: labels are {low} to {high}, but there are {self.num_classes} "
                    "classes: "
                    + (f"number them from 0 to {self.num_classes - 1}" if self.classes else NAME)
                )
        shapes = [tuple(part.images.shape[1:]) for part in self.parts if len(part)]
        if any(one[-1] in COLOURS and min(one[:2]) > max(COLOURS) for one in shapes):
            raise ValueError(
                f"{self.name}: images are {shapes[0]}, with their channels last: put them first, "
                "as images.permute(0, 3, 1, 2) does"
            )
        if len(set(shapes)) > 1:
            other = next(shape for shape in shapes if shape != shapes[0])
            raise ValueError(
                f"{self.name}: training images are {shapes[0]} and test images {other} "
                "(channels, height, width): resize one of them"
            )
        if len({part.images.is_floating_point() for part in self.parts if len(part)}) > 1:
            raise ValueError(
                f"{self.name}: some images are bytes, which are normalised, and others floats, "
                "which are not: give all of them alike"
            )
        if len({part.multi_label for part in self.parts if len(part)}) > 1:
            raise ValueError(
                f"{self.name}: some examples may have several labels and others have one: give "
                "rows of 0 and 1 for all of them"
            )
        demand_text(self.classes, f"{self.name}: the class")
        for word, given in (("mean", self.mean), ("std", self.std)):
            if given is not None and not _are_numbers(given, 0.0 if word == "std" else -math.inf):
                raise ValueError(
                    f"{self.name}: {word} is {given}: give one number a channel"
                    + (", above 0" if word == "std" else "")
                )

    @property
    def parts(self) -> list[Examples]:
        """Train, test and, if the data set has its own, validation."""
        own = [] if self.validation is None else [self.validation]
        return [self.train, self.test, *own]

    @property
    def num_classes(self) -> int:
        return len(self.classes)

    @property
    def multi_label(self) -> bool:
        """Whether an image may have several of the classes, or none."""
        return any(part.multi_label for part in self.parts)

    @cached_property
    def digest(self) -> str:
        """A fingerprint of the whole content: classes, mean, deviation, every pixel and label."""
        found = hashlib.sha256(repr((self.classes, self.mean, self.std)).encode())
        for part in self.parts:
            for piece in part.contents():
                found.update(piece)
        return found.hexdigest()

    @cached_property
    def test_digest(self) -> str:
        """A fingerprint of the test examples alone."""
        found = hashlib.sha256()
        for piece in self.test.contents():
            found.update(piece)
        return found.hexdigest()[:16]

    @property
    def shape(self) -> tuple[int, int, int]:
        channels, height, width = self.train.images.shape[1:]
        return channels, height, width


def _are_numbers(given: Any, above: float) -> bool:
    """Whether `given` is a list of finite numbers greater than `above`."""
    try:
        return all(math.isfinite(one) and one > above for one in given)
    except TypeError:
        return False


class Pool(NamedTuple):
    """What a partition divides: the training examples, among a number of clients."""

    examples: Examples
    num_classes: int
    num_clients: int  #: 0: the partition finds its clients in the data
    rng: np.random.Generator  #: for all its draws


@dataclass(frozen=True)
class Holdings:
    """Which client holds which examples: one index, with the parts of the clients in order."""

    index: Tensor  #: [n] int64, positions in Examples
    offsets: Tensor  #: [K + 1] int64: client k holds index[offsets[k] : offsets[k + 1]]
    names: tuple[str, ...] | None = None  #: K: the writer, the user, the cell, if known

    @classmethod
    def of(cls, members: Sequence[Tensor]) -> Holdings:
        """The holdings of clients, from the examples of each."""
        sizes = torch.tensor([len(m) for m in members], dtype=torch.int64)
        index = torch.cat(list(members)) if members else torch.empty(0, dtype=torch.int64)
        return cls(index.to(torch.int64), offsets_of(sizes))

    def __len__(self) -> int:
        return self.offsets.shape[0] - 1  # a tensor's own len() takes four times as long

    @cached_property
    def sizes(self) -> Tensor:  # [K]
        offsets = self.offsets.numpy()
        return torch.from_numpy(offsets[1:] - offsets[:-1])

    @cached_property
    def owners(self) -> Tensor:  # [n] which client holds each entry of index
        return torch.from_numpy(np.repeat(np.arange(len(self)), self.sizes.numpy()))

    def members(self, client: int) -> Tensor:
        return self.index[int(self.offsets[client]) : int(self.offsets[client + 1])]

    def take(self, clients: Tensor) -> Holdings:
        """What these clients hold, in this order; a client may be listed twice."""
        wanted, starts = clients.numpy(), self.offsets.numpy()
        sizes = starts[wanted + 1] - starts[wanted]
        offsets = np.zeros(len(wanted) + 1, np.int64)
        sizes.cumsum(out=offsets[1:])
        places = np.repeat(starts[wanted] - offsets[:-1], sizes) + np.arange(offsets[-1])
        names = self.names and tuple(self.names[client] for client in wanted.tolist())
        return Holdings(
            torch.from_numpy(self.index.numpy()[places]), torch.from_numpy(offsets), names
        )

    @classmethod
    def joined(cls, some: Sequence[Holdings]) -> Holdings:
        """Several holdings as one, the clients of one after those of another, without names."""
        sizes = torch.cat([one.sizes for one in some])
        return cls(torch.cat([one.index for one in some]), offsets_of(sizes))

    def label_counts(self, labels: Tensor, num_classes: int) -> Tensor:  # [K, L] int64
        """How many examples of each label a client holds, by labels [N], or rows [N, L]."""
        if labels.ndim == 2:
            counts = torch.zeros(len(self), num_classes, dtype=torch.int64)
            return counts.index_add(0, self.owners, labels[self.index])
        first = np.repeat(np.arange(len(self)) * num_classes, self.sizes.numpy())
        cell = first + labels.numpy()[self.index.numpy()]
        found = np.bincount(cell, minlength=len(self) * num_classes)
        return torch.from_numpy(found).view(len(self), num_classes)

    def digest(self) -> str:
        """A fingerprint: equal for equal partitions, on every machine."""
        content = hashlib.sha256()
        for tensor in (self.offsets, self.index):
            content.update(tensor.numpy().astype("<i8", copy=False).data)
        return content.hexdigest()[:16]


def offsets_of(sizes: Tensor) -> Tensor:  # [K + 1]
    """Where the part of each client starts, and where the last one ends."""
    return torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])


@runtime_checkable
class Split(Protocol):
    """How examples are spread over clients. Most splits are the same in every round."""

    @property
    def num_clients(self) -> int: ...

    def holdings(self, round: int, cohort: Tensor) -> Holdings:
        """What each client of the cohort holds in this round."""
        ...

    def sizes(self, round: int) -> Tensor:  # [K]
        """How many examples each client holds in this round."""
        return self.holdings(round, torch.arange(self.num_clients)).sizes


class Lasting(Split):
    """A split that is the same in every round."""


@dataclass(frozen=True)
class Fixed(Lasting):
    """A split that lists the holdings of all clients."""

    everyone: Holdings

    @property
    def num_clients(self) -> int:
        return len(self.everyone)

    def holdings(self, round: int, cohort: Tensor) -> Holdings:
        return self.everyone.take(cohort)

    def sizes(self, round: int) -> Tensor:  # [K]
        return self.everyone.sizes


@dataclass(frozen=True)
class Shortened(Split):
    """The first `most` examples of each client of `whole`."""

    whole: Split
    most: int

    @property
    def num_clients(self) -> int:
        return self.whole.num_clients

    def holdings(self, round: int, cohort: Tensor) -> Holdings:
        held = self.whole.holdings(round, cohort)
        return Holdings.of([held.members(k)[: self.most] for k in range(len(held))])

    def sizes(self, round: int) -> Tensor:  # [K]
        return self.whole.sizes(round).clamp(max=self.most)


@dataclass(frozen=True)
class Federation:
    """Examples and which client holds which: an index over one tensor, never a copy."""

    examples: Examples
    num_classes: int
    split: Split

    @property
    def num_clients(self) -> int:
        return self.split.num_clients

    def holdings(self, round: int, cohort: Tensor) -> Holdings:
        return self.split.holdings(round, cohort)

    def sizes(self, round: int) -> Tensor:  # [K]
        return self._sizes if isinstance(self.split, Lasting) else self.split.sizes(round)

    def offsets(self, round: int) -> Tensor:  # [K + 1]
        """How many examples the clients before each client hold in this round, and the total."""
        lasts = isinstance(self.split, Lasting)
        return self._offsets if lasts else offsets_of(self.split.sizes(round))

    def num_examples(self, round: int) -> int:
        """How many examples clients hold in this round; one that two clients hold counts twice."""
        return int(self.offsets(round)[-1])

    def everyone(self, round: int, most: int | None = None) -> Holdings:
        """What all clients hold in this round; of a drawn split, only the first `most` clients."""
        if isinstance(self.split, Fixed):
            return self.split.everyone
        count = self.num_clients if most is None else min(self.num_clients, most)
        return self.split.holdings(round, torch.arange(count))

    def described(self) -> Holdings:
        """The holdings that a run describes, in the first round."""
        return self.everyone(0, MOST_DESCRIBED)

    def parts(self, round: int) -> Iterator[Holdings]:
        """The same in parts of AT_ONCE clients; a listed split is one part."""
        if isinstance(self.split, Fixed):
            yield self.split.everyone
        else:
            for some in torch.split(torch.arange(self.num_clients), AT_ONCE):
                yield self.split.holdings(round, some)

    def shortened(self, most: int) -> Federation:
        """The same clients with only their first few examples, for trials and timings."""
        split: Split = Shortened(self.split, most)
        if isinstance(self.split, Fixed):
            split = Fixed(split.holdings(0, torch.arange(self.num_clients)))
        return replace(self, split=split)

    def label_counts(self, holdings: Holdings) -> Tensor:  # [C, L] int64
        return holdings.label_counts(self.labels, self.num_classes)

    @cached_property
    def _sizes(self) -> Tensor:  # [K] of a split that lasts: read in every round, so cached
        return self.split.sizes(0)

    @cached_property
    def _offsets(self) -> Tensor:  # [K + 1] likewise
        split = self.split
        return split.everyone.offsets if isinstance(split, Fixed) else offsets_of(self._sizes)

    @cached_property
    def labels(self) -> Tensor:  # [N], or [N, L]
        """The labels on the host, where plans are drawn."""
        return self.examples.wanted(slice(None), self.num_classes).cpu()
