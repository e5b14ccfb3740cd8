"""The nouns, in the order a round meets them.

Shapes are written as trailing comments: K clients, C the cohort (or the part of it that one
program trains together), T steps, B batch, L labels, N examples, n examples held.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from fedlens.reading import demand_text

MOST_DESCRIBED = 10_000  # clients of whom a run says one by one what they hold

Tree = dict[str, Tensor]
"""Named tensors: a model's parameters, an update, a momentum."""

Number = float | Tensor
"""A number that a slot uses. A tensor holds one value for each experiment of a sweep, [G], or for
each of its clients, [C]; or one for all, [], where it may change from round to round."""


@dataclass(frozen=True)
class Examples:
    """Images and their labels, and whatever else is known of each (its client, its place).

    Parts of a set share its images: `rows` then says which of them are theirs. Whoever looks at
    images asks for them by `read`.
    """

    images: Tensor  # [N, channels, H, W] uint8, or floats that are used as they are
    labels: Tensor  # [N] int64
    columns: Mapping[str, np.ndarray[Any, Any]] = field(default_factory=dict)  # [N] each
    rows: Tensor | None = None  # [N] positions in `images`; without it, each at its own

    def __post_init__(self) -> None:
        for what, given in (("images", self.images), ("labels", self.labels)):
            if not isinstance(given, Tensor):
                raise ValueError(
                    f"{what} are a {type(given).__name__}: give a tensor, "
                    f"as torch.as_tensor({what}) makes one"
                )
        if self.images.ndim != 4:
            shape = tuple(self.images.shape)
            raise ValueError(f"images must be [N, channels, height, width]: got {shape}")
        num_images = len(self.images if self.rows is None else self.rows)
        if num_images != len(self.labels):
            raise ValueError(f"{num_images} images but {len(self.labels)} labels")
        if self.labels.is_floating_point() or self.labels.ndim != 1:
            got = f"{self.labels.dtype} of shape {tuple(self.labels.shape)}"
            raise ValueError(
                f"labels are {got}: give one whole number an image "
                "(of one-hot rows, labels.argmax(1))"
            )
        if self.labels.dtype is not torch.int64:
            object.__setattr__(self, "labels", self.labels.to(torch.int64))

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, which: Tensor | slice) -> Tensor:
        """The images of some examples: a copy, unless it is a slice of a whole set."""
        return self.images[which if self.rows is None else self.rows[which]]

    def take(self, index: Tensor) -> Examples:
        """Some of the examples, which share the images of all."""
        columns = {name: column[index.numpy()] for name, column in self.columns.items()}
        rows = index if self.rows is None else self.rows[index]
        return Examples(self.images, self.labels[index], columns, rows)

    def to(self, device: torch.device, images: Tensor | None = None) -> Examples:
        """The same on a device, where the images may be already."""
        rows = None if self.rows is None else self.rows.to(device)
        images = self.images.to(device) if images is None else images
        return Examples(images, self.labels.to(device), self.columns, rows)


DIGESTED = 1024  # examples at once: more would copy a mapped set into memory


class LeftOut(NamedTuple):
    """A file that a data set was made without."""

    file: str
    why: str


@dataclass(frozen=True)
class Dataset:
    """Examples to train on and to test on, and what a label means."""

    name: str
    train: Examples
    test: Examples
    classes: tuple[str, ...]  # L names
    mean: tuple[float, ...] | None = None  # per channel, of images scaled to [0, 1]
    std: tuple[float, ...] | None = None
    left_out: tuple[LeftOut, ...] = ()  # files that could not be decoded
    is_mapped: bool = False  # its images are a file that may be larger than memory

    def __post_init__(self) -> None:
        for part in (self.train, self.test):
            if (
                len(part)
                and not 0 <= int(part.labels.min()) <= int(part.labels.max()) < self.num_classes
            ):
                raise ValueError(f"{self.name}: labels must lie in 0..{self.num_classes - 1}")
        shapes = [tuple(part.images.shape[1:]) for part in (self.train, self.test) if len(part)]
        if len(set(shapes)) > 1:
            raise ValueError(
                f"{self.name}: training images are {shapes[0]} and test images {shapes[1]} "
                "(channels, height, width): resize one of them"
            )
        demand_text(self.classes, f"{self.name}: the class")

    @property
    def num_classes(self) -> int:
        return len(self.classes)

    @cached_property
    def digest(self) -> str:
        """A fingerprint of what is in it: of every pixel and every label."""
        found = hashlib.sha256(repr((self.classes, self.mean, self.std)).encode())
        for part in (self.train, self.test):
            shape = tuple(part.images.shape[1:])
            found.update(repr((len(part), shape, part.images.dtype)).encode())
            for start in range(0, len(part), DIGESTED):
                some = slice(start, start + DIGESTED)
                for tensor in (part.read(some), part.labels[some]):
                    flat = tensor.detach().cpu().contiguous().reshape(-1)
                    found.update(flat.view(torch.uint8).numpy().data)
        return found.hexdigest()

    @property
    def shape(self) -> tuple[int, int, int]:
        channels, height, width = self.train.images.shape[1:]
        return channels, height, width


@dataclass(frozen=True)
class Holdings:
    """Who holds which examples: an index, one client's part after another's."""

    index: Tensor  # [n] int64, positions in Examples
    offsets: Tensor  # [K + 1] int64: client k holds index[offsets[k] : offsets[k + 1]]
    names: tuple[str, ...] | None = None  # K: the writer, the user, the cell, where there is one

    @classmethod
    def of(cls, members: Sequence[Tensor]) -> Holdings:
        """The holdings of clients whose examples are listed one by one."""
        sizes = torch.tensor([len(m) for m in members], dtype=torch.int64)
        index = torch.cat(list(members)) if members else torch.empty(0, dtype=torch.int64)
        return cls(index.to(torch.int64), offsets_of(sizes))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @cached_property
    def sizes(self) -> Tensor:  # [K]
        return self.offsets.diff()

    @cached_property
    def owners(self) -> Tensor:  # [n] which client holds each entry of index
        return torch.repeat_interleave(torch.arange(len(self)), self.sizes)

    def members(self, client: int) -> Tensor:
        return self.index[int(self.offsets[client]) : int(self.offsets[client + 1])]

    def take(self, clients: Tensor) -> Holdings:
        """What these clients hold, in this order; a client may stand in it twice."""
        wanted, starts = clients.numpy(), self.offsets.numpy()
        sizes = starts[wanted + 1] - starts[wanted]
        offsets = np.concatenate([[0], sizes.cumsum()])
        places = np.repeat(starts[wanted] - offsets[:-1], sizes) + np.arange(offsets[-1])
        names = self.names and tuple(self.names[client] for client in wanted.tolist())
        return Holdings(
            torch.from_numpy(self.index.numpy()[places]), torch.from_numpy(offsets), names
        )

    @classmethod
    def joined(cls, some: Sequence[Holdings]) -> Holdings:
        """The holdings of some clients after those of others, without their names."""
        sizes = torch.cat([one.sizes for one in some])
        return cls(torch.cat([one.index for one in some]), offsets_of(sizes))

    def label_counts(self, labels: Tensor, num_classes: int) -> Tensor:  # [K, L] int64
        cell = self.owners * num_classes + labels.index_select(0, self.index)
        return torch.bincount(cell, minlength=len(self) * num_classes).view(len(self), num_classes)

    def digest(self) -> str:
        """A fingerprint: equal for equal partitions, on every machine."""
        content = hashlib.sha256()
        for tensor in (self.offsets, self.index):
            content.update(tensor.numpy().astype("<i8", copy=False).data)
        return content.hexdigest()[:16]


def offsets_of(sizes: Tensor) -> Tensor:  # [K + 1]
    """Where the part of each client starts, and the last one ends."""
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


@dataclass(frozen=True)
class Fixed(Split):
    """A split that does not depend on the round."""

    everyone: Holdings

    @property
    def num_clients(self) -> int:
        return len(self.everyone)

    def holdings(self, round: int, cohort: Tensor) -> Holdings:
        return self.everyone.take(cohort)

    def sizes(self, round: int) -> Tensor:  # [K]
        return self.everyone.sizes


@dataclass(frozen=True)
class Federation:
    """Examples and who holds them: an index over one tensor, never a copy."""

    examples: Examples
    num_classes: int
    split: Split

    @property
    def num_clients(self) -> int:
        return self.split.num_clients

    def holdings(self, round: int, cohort: Tensor) -> Holdings:
        return self.split.holdings(round, cohort)

    def sizes(self, round: int) -> Tensor:  # [K]
        return self.split.sizes(round)

    def offsets(self, round: int) -> Tensor:  # [K + 1]
        """How many examples are held by all clients before each, and by all, in this round."""
        if isinstance(self.split, Fixed):
            return self.split.everyone.offsets
        return offsets_of(self.split.sizes(round))

    def num_examples(self, round: int) -> int:
        """How many examples all clients hold in this round; one that two hold counts twice."""
        if isinstance(self.split, Fixed):
            return len(self.split.everyone.index)
        return int(self.split.sizes(round).sum())

    def described(self) -> Holdings:
        """What clients hold, as far as a run describes it: all of it, if that stays the same.

        Of a split that is dealt anew, what the first MOST_DESCRIBED hold in the first round.
        """
        if isinstance(self.split, Fixed):
            return self.split.everyone
        return self.split.holdings(0, torch.arange(min(self.num_clients, MOST_DESCRIBED)))

    def everyone(self, round: int) -> Holdings:
        """What all clients hold in this round."""
        if isinstance(self.split, Fixed):
            return self.split.everyone
        return self.split.holdings(round, torch.arange(self.num_clients))

    def label_counts(self, holdings: Holdings) -> Tensor:  # [C, L] int64
        return holdings.label_counts(self.labels, self.num_classes)

    @cached_property
    def labels(self) -> Tensor:
        """The labels where plans are drawn: on the host."""
        return self.examples.labels.cpu()


@dataclass(frozen=True)
class Plan:
    """Which examples each client sees, step by step, drawn before any training."""

    index: Tensor  # [C, T, B] int64, positions in Examples
    counts: Tensor  # [C, T] int64: the first `counts` of a batch are examples, the rest padding

    @property
    def steps(self) -> Tensor:  # [C] how many steps each client takes
        return (self.counts > 0).sum(1)


class Cohort(NamedTuple):
    """What the server knows of the clients that take part in a round: of those that report."""

    clients: Tensor  # [C] int64
    sizes: Tensor  # [C] examples held
    steps: Tensor  # [C] local steps planned
    size_shares: Tensor  # [C] n_k / n over the cohort
    label_shares: Tensor | None  # [C, L] n_k^c / n^c over the cohort, if the algorithm discloses it
    num_clients: int  # in the whole federation
    num_examples: int  # held by all those that `weigh.over` names
    staleness: Tensor | None = None  # [C] server steps since each got its model, if not all got it


class Facts(NamedTuple):
    """What a client knows of its own data. Facts are made at the client and stay there."""

    size: Tensor  # [C]
    label_counts: Tensor  # [C, L]


class Batch(NamedTuple):
    """One step's examples of each client."""

    images: Tensor  # [C, B, channels, H, W]
    labels: Tensor  # [C, B]
    mask: Tensor  # [C, B] 1 for an example, 0 for padding


class LayerFactors(NamedTuple):
    """What C clients have in place of the weights of a linear layer (see engines/factored.py)."""

    inputs: Tensor  # [C, T * B, features] of the steps so far; zeros where none was taken yet
    grads: Tensor  # [C, T * B, out] of the loss by the layer's outputs
    taken: Tensor  # [C] int64: steps
    drift: Tensor | None  # [C, out, features]


class StepNumbers(NamedTuple):
    """What a local step does to factors."""

    lr: Tensor  # [C]
    log_decay: Tensor  # [C] log2 of LocalStep.decay
    drift_times: Tensor  # [C, T + 1] how often the drift is in the weights, by steps taken


class FactoredWeights(NamedTuple):
    """The factors of all such layers, and the numbers of their steps."""

    layers: dict[str, LayerFactors]  # by the name of the weight
    exact: StepNumbers  # in float64
    numbers: StepNumbers  # in the dtype that sums are made in


Memory = dict[str, Tree]
"""What is remembered from one round, or one step, to the next, by name."""


@dataclass
class Local:
    """A client, or C of them side by side, during local training."""

    params: Tree  # [C, ...] the model being trained
    buffers: Tree  # [C, ...]
    anchor: Tree  # [1, ...] the server's parameters, where this round started; [C, ...] in a sweep
    exact: Tree  # [1, ...] the same and the float buffers in float64, when it is time to upload
    told: Memory  # [1, ...] what the server tells besides the model; [C, ...] in a sweep
    facts: Facts
    memory: Memory  # [C, ...] what the client kept from its last round; it is only read
    solver: Memory  # [C, ...] what `solve` remembers between steps
    steps: Tensor  # [C] how many steps it takes
    group: Tensor | None = None  # [C] which experiment of a sweep it belongs to
    step: Tensor | None = None  # [] the step it is at, counted from 0
    count: Tensor | None = None  # [C] examples in this step's batch
    loss: Tensor | None = None  # [C] their mean loss, without penalties
    drift: Tree = field(default_factory=dict)  # [C, ...] see LocalStep
    numbers: tuple[Tensor, ...] = ()  # [] or [C] each: the numbers of `objective` and `solve`
    lr: Number | None = None  # of its steps, if it has one, when it is time to upload
    factored: FactoredWeights | None = None  # of the layers whose weights are not in `params`

    def ends(self, passes: int) -> Tensor:
        """[C] Whether this step ends one of the equal passes that a client's steps fall into."""
        assert self.step is not None
        return (self.step + 1) % (self.steps // passes).clamp(min=1) == 0


@dataclass(frozen=True)
class Upload:
    """What a client sends, and what it keeps."""

    update: Tree  # [C, ...] parameters and float buffers, local minus server, float64
    keep: Memory = field(default_factory=dict)  # [C, ...] remembered until its next round
    extra: Memory = field(default_factory=dict)  # [C, ...] sent besides: the server gets the sums
    scalars: Mapping[str, Tensor] = field(default_factory=dict)  # [C] each, for the record
    tracks: tuple[str, ...] = ()
    """The parts of `keep` that say what the server has of this client, so that they must follow
    what is really sent, should a channel change it."""


class Gathered(NamedTuple):
    """What the server has besides the update, once all uploads are in."""

    cohort: Cohort
    extra: Memory  # summed over the cohort


def is_on(number: Number) -> bool:
    """Whether a number does anything: 0.0 switches its term off."""
    return isinstance(number, Tensor) or number != 0


def tree_map(fn: Callable[..., Tensor], *trees: Tree) -> Tree:
    return {name: fn(*(tree[name] for tree in trees)) for name in trees[0]}


def per_row(number: Number, like: Tensor) -> Number:
    """`number`, shaped to multiply `like` row by row if it holds one value a row."""
    if isinstance(number, Tensor) and number.ndim:
        return number.view(-1, *[1] * (like.ndim - 1))
    return number


def zeros_like(params: Tree) -> Tree:
    return tree_map(torch.zeros_like, params)


def zeros_at_first(params: Tree, told: Memory) -> Tree:
    """What a client never seen remembers, where that is nothing."""
    return zeros_like(params)


def squared_distance(a: Tree, b: Tree) -> Tensor:  # [C]
    return torch.stack([(a[name] - b[name]).flatten(1).square().sum(1) for name in a]).sum(0)
