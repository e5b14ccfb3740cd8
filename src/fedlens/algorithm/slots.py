"""What fills the slots of an algorithm: a protocol for each kind, with all that it may declare.

A filling is a frozen dataclass that derives from its protocol. What it does not declare has the
default given here. Shapes are those of `core.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from fedlens.core import (
    Batch,
    Cohort,
    Gathered,
    Local,
    Memory,
    Moved,
    Number,
    Plan,
    Tree,
    Upload,
    is_on,
)
from fedlens.core.federation import Federation, Holdings
from fedlens.network.layout import Layout, Role
from fedlens.privacy.events import Release


@runtime_checkable
class Select(Protocol):
    """Which clients take part in a round."""

    replacement: bool = False  # whether a client may be drawn twice in a round

    @property
    def cohort_size(self) -> int:
        """How many clients take part."""
        ...

    def of_size(self, count: int) -> Select:
        """The same for `count` clients; a larger cohort starts with that of a smaller `count`."""
        raise ValueError(
            f"{type(self).__name__} always chooses {self.cohort_size} clients: leave "
            "reporting.over_select and asynchronous algorithms out, or give it `of_size`"
        )

    def check(self, num_clients: int) -> None:
        """Raise a ValueError if it cannot choose among this many clients."""
        return

    def __call__(self, federation: Federation, round: int, key: Tensor) -> Tensor: ...  # [C]


@runtime_checkable
class Draw(Protocol):
    """Which of its examples each client sees in a round, step by step."""

    by_client: ClassVar[bool] = False  # whether the draw of a client is independent of the others

    def __call__(self, holdings: Holdings, client_keys: Tensor) -> Plan: ...

    def plan_size(self, held: int) -> int:
        """T * B of the plan of a client that holds this many examples."""
        return held


@runtime_checkable
class ExampleWeight(Protocol):
    """How much each example counts in the loss of its client."""

    reads_model: ClassVar[bool] = True  # if False, an engine need not keep the whole model

    def __call__(self, batch: Batch, local: Local) -> Tensor: ...  # [C, B]


@runtime_checkable
class Penalty(Protocol):
    """A term that is added to the loss of a client."""

    reads_features: ClassVar[bool] = False  # whether it needs `local.features` and `local.batch`

    @property
    def pull(self) -> Number | None:
        """mu, if it is (mu / 2) ||w - server||^2 + <drift, w>, or without drift; otherwise None."""
        return None

    @property
    def drift(self) -> Drift | None:
        return None

    def __call__(self, local: Local) -> Tensor: ...  # [C]


Drift = Callable[[Local, str], Tensor]
"""What is the same in all steps of a round, for the parameter of this name: [C, ...]."""


@dataclass(frozen=True)
class LocalStep:
    """What one local step does to the parameters w of a client:

        d = grad + weight_decay * w + pull * (w - server) + drift
        v = momentum * v + d
        w = w - lr * v

    where grad is the gradient of the loss alone, and drift is the same in all steps of a round. A
    number that is 0.0 switches its term off for good; any other may change from round to round.
    """

    lr: Number
    momentum: Number = 0.0
    weight_decay: Number = 0.0
    pull: Number = 0.0
    drift: Drift | None = None

    @property
    def is_plain(self) -> bool:
        """Whether a step is w = w - lr * grad, and nothing else."""
        return self.contracts and not is_on(self.pull) and self.drift is None

    @property
    def contracts(self) -> bool:
        """Whether a step is w = server + decay * (w - server) - lr * (grad + drift).

        That is so without momentum and weight decay.
        """
        return not (is_on(self.momentum) or is_on(self.weight_decay))

    @cached_property
    def decay(self) -> Number:
        """The factor by which a step scales w - server, if it `contracts`."""
        return 1.0 - self.lr * self.pull


@runtime_checkable
class Solve(Protocol):
    """How a client moves along a gradient.

    Every tree has a leading axis of clients. `update` may write in place, and returns the
    parameters and the memory for the next step.
    """

    @property
    def step(self) -> LocalStep | None:
        """A step as a `LocalStep`; None if it has another form."""
        return None

    @property
    def learning_rate(self) -> Number | None:
        """The learning rate of its steps, if it has one."""
        return None

    @property
    def drift(self) -> Drift | None:
        """What `update` reads in `local.drift`: it is computed once, before the first step."""
        return None

    @property
    def carries(self) -> frozenset[str]:
        """The parts of its memory that are kept for the next round if local.reset = false."""
        return frozenset()

    @property
    def reads_batch(self) -> bool:
        """Whether it asks for the gradients of other models, by `local.gradients`."""
        return False

    def init(self, params: Tree) -> Memory: ...

    def update(self, grads: Tree, memory: Memory, params: Tree, local: Local) -> Moved: ...


class Wraps(Solve, Protocol):
    """A solver around another one, by default with the learning rate and memory of that one."""

    inner: Solve

    @property
    def learning_rate(self) -> Number | None:
        return self.inner.learning_rate

    @property
    def drift(self) -> Drift | None:
        return self.inner.drift

    @property
    def carries(self) -> frozenset[str]:
        return self.inner.carries

    def init(self, params: Tree) -> Memory:
        return self.inner.init(params)


class Encoded(NamedTuple):
    """The updates of C clients after a channel step."""

    update: Tree  # [C, ...] as the server will read it; new tensors
    scalars: Mapping[str, Tensor] = {}  # [C] each: its mean over the clients goes into the record
    memory: Mapping[str, Tree] = {}  # [C, ...] of the step, for the client's next round
    notes: Mapping[str, Tree] = {}  # [C, ...] what `pack` needs to know of a tensor, by its name


class Decoded(NamedTuple):
    """The combined update after a channel step."""

    update: Tree
    scalars: Mapping[str, Tensor] = {}  # [] each, for the record
    memory: Mapping[str, Tree] = {}  # of the server, for the next round


@runtime_checkable
class ChannelStep(Protocol):
    """A processing step between clients and server, in two halves.

    `encode` is the client's half, on what it uploads; `decode` the server's, on what was combined.
    The client halves of a channel run in order, the server halves in reverse.
    """

    linear: ClassVar[bool] = True  # whether uploads may be summed before they reach `decode`
    scales: ClassVar[bool] = False
    """Whether `encode` multiplies all that a client sends by one number, which depends on its norm
    alone: so it draws nothing, and the order of numbers in a tensor does not matter to it."""
    covers: ClassVar[bool] = False
    """Whether all that is known of the clients' data goes through it. Then the record has nothing
    that clients measured, and what they would send beside their update is refused."""
    tells: ClassVar[frozenset[str]] = frozenset()
    """The parts of the server's memory that clients are told: `encode` has them in its own."""

    def check(self, layout: Layout, weigh: Weigh) -> None:
        """Raise a ValueError for a model, or for shares, that this cannot be used with."""
        return

    @property
    def remembers(self) -> bool:
        """Whether clients keep something for their next round."""
        return False

    def init(self, params: Tree) -> Memory:
        """What a client that never took part remembers of this step."""
        return {}

    def encode(
        self, update: Tree, memory: Memory, client_keys: Tensor, layout: Layout
    ) -> Encoded: ...

    def begin(self, params: Tree) -> Memory:
        """What the server remembers of this step before the first round."""
        return {}

    def decode(
        self, combined: Tree, key: Tensor, cohort: Cohort, memory: Memory, round: int
    ) -> Decoded:
        return Decoded(combined, memory=memory)

    def release(self, round: int) -> Release | None:
        """What this round, counted from 0, tells of the clients, if the step makes it private."""
        return None

    def num_bits(self, shape: torch.Size, bits: int, role: Role) -> int:
        """How many bits a tensor of this shape takes, if it took `bits` before this step."""
        return bits

    def pack(self, numbers: Tensor, role: Role, notes: Tree) -> Tree | None:
        """What is sent in place of the numbers [n] of a client's tensor; None: these themselves.

        A part of the name "numbers" is packed further, by the steps before this one.

        Args:
            notes: what `encode` noted of this tensor.
        """
        return None

    def unpack(self, parts: Tree, count: int, numbers: Callable[[int], Tensor]) -> Tensor:
        """The `count` numbers that `pack` was given, to the last bit.

        Args:
            parts: what `pack` returned, as a client says: a ValueError if it cannot be that.
            numbers: gives the part "numbers", of which it is told the length.
        """
        raise ValueError("a tensor was packed by a step that does not pack")


Over = Literal["cohort", "seen", "population"]
"""The clients of the round; all that have taken part so far, with these; all clients."""


@runtime_checkable
class Weigh(Protocol):
    """Each upload's final share."""

    over: Over = "cohort"  # whose examples `Cohort.num_examples` counts

    def __call__(self, cohort: Cohort) -> Tensor: ...  # [C] float64

    def for_step(self, step: LocalStep | None) -> Weigh:
        """The same for clients with this local step; None: their step has another form."""
        return self


class Received(NamedTuple):
    """What the server has of a round when it combines the uploads."""

    updates: Tree  # [C, ...]
    shares: Tensor  # [C] float64
    cohort: Cohort
    layout: Layout
    memory: Memory  # of the round before
    key: Tensor  # [] of the round


@runtime_checkable
class Combine(Protocol):
    """How uploads become one update.

    If `linear`, it may be called on parts of the cohort, whose results are added. Otherwise it
    needs all uploads at once. `uses_shares`: it weighs uploads by their shares alone. It must be
    straight-line tensor code: a GPU may record it, and a cohort's counts are then tensors.
    `sums_params`: each parameter's update is the sum of share times update, so an engine that has
    this sum in another way may call it on the other tensors only.
    """

    linear: ClassVar[bool] = False
    uses_shares: ClassVar[bool] = True
    sums_params: ClassVar[bool] = False
    reads_cohort: ClassVar[bool] = True  # whether it reads more of the clients than their updates

    @property
    def at_server(self) -> bool:
        """Whether it draws or remembers: it then defines `update`, and not `__call__`."""
        return type(self).update is not Combine.update

    @property
    def fewest(self) -> int:
        """How many uploads it needs: with fewer reports a round is below quorum."""
        return 1

    def withstands(self, clients: int) -> int | None:
        """How many of so many clients may send anything, and move it little; None: nobody says."""
        return None

    def check(self, layout: Layout) -> None:
        """Raise a ValueError for a model that lacks what this needs."""
        return

    def __call__(self, updates: Tree, shares: Tensor, cohort: Cohort, layout: Layout) -> Tree:
        raise AssertionError(f"{type(self).__name__} is called by `update`, or has neither")

    def init(self, params: Tree) -> Memory:
        """What it remembers before the first round."""
        return {}

    def update(self, given: Received) -> tuple[Tree, Memory]:
        """The combined update, and what to remember until the next round.

        If it is defined, it alone is called, once, with all uploads and the round's key. It may
        add how much each client counts, [C], as the only part, TRUST, of the memory TRUST: this
        goes into the record, and is not remembered.
        """
        return self(*given[:4]), given.memory


@runtime_checkable
class Advance(Protocol):
    """How the server updates its model: as `Solve`, with a leading axis of experiments."""

    reads_cohort: ClassVar[bool] = True  # whether it reads more of the clients than their update

    def init(self, params: Tree) -> Memory: ...

    def update(self, grads: Tree, memory: Memory, params: Tree, gathered: Gathered) -> Moved: ...


@runtime_checkable
class Tell(Protocol):
    """Something that the server sends its clients besides the model, by name."""

    reads_cohort: ClassVar[bool] = True  # whether it reads more of the clients than their update

    def init(self, params: Tree, federation: Federation) -> Memory: ...

    def update(self, told: Memory, gathered: Gathered) -> Memory:
        """What the server sends from now on, given what it sent so far; returns new tensors."""
        ...


@runtime_checkable
class Personal(Protocol):
    """What of a model is each client's own, and the model that a client is measured by.

    A client starts a round with its own tensors in place of the server's.
    """

    averaged: ClassVar[bool] = False
    """Whether the server gets them, too, and averages them for clients that never took part.
    Otherwise they never leave a client, and the server's stay as they were at first."""
    beside: ClassVar[bool] = False
    """Whether a client trains its own beside the server's, and not in their place: these never
    leave it. `solve` finds them in its memory as OWN, and takes their steps."""
    sends: str = "updates of the model"
    """What leaves a client in a round, for people who are to allow it."""
    tune: int = 0
    """Passes over its own examples in which a client tunes its model at the end of a run."""

    def names(self, layout: Layout) -> Collection[str]:
        """The tensors that each client keeps; a ValueError for a model that lacks them."""
        return ()

    def start(self, model: Tree, memory: Memory) -> Tree:
        """A client's own tensors at the start of a round, [C, ...]: what it remembers, or new."""
        return {name: own.clone() for name, own in memory.get(OWN, {}).items()}

    def model(self, model: Tree, memory: Memory) -> Tree:
        """The model that a client is measured by, from the server's and what it remembers.

        A client that never took part remembers nothing.
        """
        return model | memory.get(OWN, {})


OWN = "own"  # the name under which a client remembers these tensors


@dataclass(frozen=True)
class Pace:
    """Asynchronous rounds: the server moves as soon as `buffer` updates have arrived.

    At any time, as many clients train as `select` chooses. An update is the difference from the
    model that the client `started` from, or from the one that the server has `now`.
    """

    buffer: int
    since: Literal["started", "now"] = "started"


Uploading = Callable[[Local], Upload]
"""What a client sends, and what it keeps: any function of the client after its last step."""
