"""The data types of a round, in the order in which a round uses them.

Shapes are written as trailing comments: C the cohort (or the part of it that one program
trains together), T steps, B batch, L labels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedlens.core import keys

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
    taken: Tensor | None = None  # [C] the steps, if batches may be empty

    def rows(self, which: slice | Tensor) -> Plan:
        """The plan of some of the clients."""
        taken = None if self.taken is None else self.taken[which]
        return Plan(self.index[which], self.counts[which], taken)

    @cached_property
    def steps(self) -> Tensor:  # [C] how many steps each client takes
        if self.taken is not None:
            return self.taken
        return torch.from_numpy((self.counts.numpy() > 0).sum(1))

    @cached_property
    def cuts(self) -> Cuts:
        """Valid for clients sorted by their number of steps, as in `ClientInputs`."""
        counts, step = self.counts.numpy(), np.arange(self.counts.shape[1])
        training = (self.steps.numpy()[:, None] > step).sum(0)
        widths = counts.max(0, initial=0).clip(min=1)  # padding, if all are empty
        num_steps = int((training > 0).sum())
        return tuple(training[:num_steps].tolist()), tuple(widths[:num_steps].tolist())


class Cohort(NamedTuple):
    """What the server knows about the clients of a round that report."""

    clients: Tensor  # [C] int64, for `combine` on the host
    sizes: Tensor  # [C] examples held
    steps: Tensor  # [C] local steps planned
    size_shares: Tensor  # [C] n_k / n over the cohort
    label_shares: Tensor | None  # [C, L] n_k^c / n^c over the cohort, if the algorithm discloses it
    num_clients: int  # in the whole federation
    num_examples: int  # held by all clients that `weigh.over` names
    staleness: Tensor | None = None  # [C] server steps since each got its model, if asynchronous


class Facts(NamedTuple):
    """What a client knows about its own data. Facts are computed at the client and stay there."""

    size: Tensor  # [C]
    label_counts: Tensor  # [C, L]


class Batch(NamedTuple):
    """The examples of one step, for each client."""

    images: Tensor  # [C, B, channels, H, W]
    labels: Tensor  # [C, B]
    mask: Tensor  # [C, B] 1 for an example, 0 for padding


class LayerFactors(NamedTuple):
    """What C clients have in place of the weights of a linear layer (see engines/factored.py)."""

    inputs: Tensor  # [C, T * B, features] of the steps so far; zeros for later steps
    grads: Tensor  # [C, T * B, out] of the loss with respect to the layer's outputs
    drift: Tensor | None  # [C, out, features]


class StepNumbers(NamedTuple):
    """The numbers by which a local step changes factors."""

    lr: Tensor  # [C]
    log_decay: Tensor  # [C] log2 of LocalStep.decay
    drift_times: Tensor | None  # [C, T + 1] how often a drift is in the weights, after t steps


class FactoredWeights(NamedTuple):
    """The factors of all such layers, and the numbers of their steps."""

    layers: dict[str, LayerFactors]  # by the name of the weight
    exact: StepNumbers  # in float64
    numbers: StepNumbers  # in the dtype that sums are made in


OWN = keys.purpose("own")  # keeps the names that algorithms choose apart from those of Fedlens

Memory = dict[str, Tree]
"""What is remembered from one round, or one step, to the next, by name."""

Moved = tuple[Tree, Memory]
"""The parameters after a step, and what is remembered for the next one."""


@dataclass
class Local:
    """A client, or C of them side by side, during local training."""

    params: Tree  # [C, ...] the model being trained
    buffers: Tree  # [C, ...]
    anchor: Tree  # [1, ...] the server's parameters, where this round started; [C, ...] in a sweep
    exact: Tree  # [1, ...] anchor and float buffers in float64; set for the upload
    told: Memory  # [1, ...] what the server sends besides the model; [C, ...] in a sweep
    facts: Facts
    memory: Memory  # [C, ...] what the client kept from its last round; read-only
    solver: Memory  # [C, ...] what `solve` remembers between steps
    steps: Tensor  # [C] how many steps it takes
    group: Tensor | None = None  # [C] which experiment of a sweep it belongs to
    step: Tensor | None = None  # [] the current step, counted from 0
    count: Tensor | None = None  # [C] examples in this step's batch
    loss: Tensor | None = None  # [C] their mean loss, without penalties
    drift: Tree = field(default_factory=dict)  # [C, ...] see `slots.Drift`
    numbers: tuple[Tensor, ...] = ()  # [] or [C] each: the numbers of `objective` and `solve`
    lr: Number | None = None  # of its steps, if they have one; set for the upload
    factored: FactoredWeights | None = None  # of the layers whose weights are not in `params`
    clients: Tensor | None = None  # [C] their numbers; zeros at a site, which does not know them
    client_keys: Tensor | None = None  # [C] of this round
    own: tuple[str, ...] = ()  # the tensors of the model that are each client's own
    gradients: Callable[[Tree], Tree] | None = None
    """During a step: the gradients [C, ...], on its batch and without penalties, of the loss of
    another model, whose buffers it moves; what the tree lacks is as in this model."""
    batch: Batch | None = None  # of this step, if a penalty reads features
    features: Tensor | None = None  # [C, B, ...] the inputs of the last linear layer, likewise
    features_of: Callable[[Tree], Tensor] | None = None
    """Those of another model, as in training, without gradients."""

    def key(self, name: str) -> Tensor:  # [C]
        """The random key of each client for draws called `name`, in this step or in `upload`.

        It is the same for all engines: see `fedlens.core.keys`.
        """
        assert self.client_keys is not None
        key = keys.fold(self.client_keys, OWN, keys.purpose(name))
        return key if self.step is None else keys.fold(key, self.step)

    def ends(self, passes: int) -> Tensor:
        """[C] Whether this step ends one of the `passes` equal parts of a client's steps."""
        assert self.step is not None
        return (self.step + 1) % (self.steps // passes).clamp(min=1) == 0


@dataclass(frozen=True)
class Upload:
    """What a client sends, and what it keeps."""

    update: Tree  # [C, ...] parameters and float buffers, local minus server, float64
    keep: Memory = field(default_factory=dict)  # [C, ...] remembered until its next round
    extra: Memory = field(default_factory=dict)  # [C, ...] also sent: the server gets the sums
    scalars: Mapping[str, Tensor] = field(default_factory=dict)  # [C] each, for the record
    tracks: tuple[str, ...] = ()
    """The parts of `keep` that mirror what the server has of this client: a change that a channel
    makes to the update is made to them, too."""


class Gathered(NamedTuple):
    """What the server has once all uploads have arrived."""

    cohort: Cohort
    extra: Memory  # summed over the cohort
    update: Tree  # combined, as `advance` applies it; float64


def is_on(number: Number) -> bool:
    """Whether a number has an effect: 0.0 switches its term off."""
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
    """The initial memory of a client that was never selected: zeros."""
    return zeros_like(params)


def squared_norm(tree: Tree) -> Tensor:  # [C]
    return torch.stack([t.flatten(1).square().sum(1) for t in tree.values()]).sum(0)


def squared_distance(a: Tree, b: Tree) -> Tensor:  # [C]
    return squared_norm({name: a[name] - b[name] for name in a})
