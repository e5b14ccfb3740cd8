"""The nouns, in the order a round meets them.

Shapes are written as trailing comments: C the cohort (or the part of it that one program
trains together), T steps, B batch, L labels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from fedlens import keys

Tree = dict[str, Tensor]
"""Named tensors: a model's parameters, an update, a momentum."""

Number = float | Tensor
"""A number that a slot uses. A tensor holds one value for each experiment of a sweep, [G], or for
each of its clients, [C]; or one for all, [], where it may change from round to round."""

Cuts = tuple[tuple[int, ...], tuple[int, ...]]
"""For each step, how many clients still train, and how many examples their batches hold."""


@dataclass(frozen=True)
class Plan:
    """Which examples each client sees, step by step, drawn before any training."""

    index: Tensor  # [C, T, B] int64, positions in Examples
    counts: Tensor  # [C, T] int64: the first `counts` of a batch are examples, the rest padding

    @cached_property
    def steps(self) -> Tensor:  # [C] how many steps each client takes
        return torch.from_numpy((self.counts.numpy() > 0).sum(1))

    @cached_property
    def cuts(self) -> Cuts:
        """They hold for clients sorted by their steps, as `ClientInputs` has them."""
        counts = self.counts.numpy()
        training, widths = (counts > 0).sum(0), counts.max(0, initial=0)
        num_steps = int((training > 0).sum())
        return tuple(training[:num_steps].tolist()), tuple(widths[:num_steps].tolist())


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
    drift: Tensor | None  # [C, out, features]


class StepNumbers(NamedTuple):
    """What a local step does to factors."""

    lr: Tensor  # [C]
    log_decay: Tensor  # [C] log2 of LocalStep.decay
    drift_times: Tensor | None  # [C, T + 1] how often a drift is in the weights, by steps taken


class FactoredWeights(NamedTuple):
    """The factors of all such layers, and the numbers of their steps."""

    layers: dict[str, LayerFactors]  # by the name of the weight
    exact: StepNumbers  # in float64
    numbers: StepNumbers  # in the dtype that sums are made in


OWN = keys.purpose("own")  # of an algorithm: no name that it gives is taken

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
    client_keys: Tensor | None = None  # [C] of this round

    def key(self, name: str) -> Tensor:  # [C]
        """What a client draws by in this step, or in `upload` in this round, for what is so named.

        All engines draw the same by it: see `fedlens.keys`.
        """
        assert self.client_keys is not None
        key = keys.fold(self.client_keys, OWN, keys.purpose(name))
        return key if self.step is None else keys.fold(key, self.step)

    def ends(self, passes: int) -> Tensor:
        """[C] Whether this step ends one of the equal passes that a client's steps fall into."""
        assert self.step is not None
        return (self.step + 1) % (self.steps // passes).clamp(min=1) == 0


@dataclass(frozen=True)
class Upload:
    """What a client sends, and what it keeps."""

    update: Tree  # [C, ...] parameters and float buffers, local minus server, float64
    keep: Memory = field(default_factory=dict)  # [C, ...] remembered until its next round
    extra: Memory = field(default_factory=dict)  # [C, ...] sent with it: the server gets the sums
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
