"""What a round sends to clients, and what comes back: the messages of server and clients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedlens.core import Cohort, Facts, Memory, Plan, Tree, keys
from fedlens.core.trees import converted, join, map_tensors, moved, tensors_in, with_tensors

COUNTS = ("num_clients", "num_examples")  # of a Cohort
DROPOUT = keys.purpose("dropout")


class Shared(NamedTuple):
    """What all clients of a cohort are sent, with a leading axis of experiments or, if clients of
    one experiment started from several versions of its model, of these versions."""

    params: Tree  # [G, ...]
    buffers: Tree  # [G, ...]
    exact: Tree  # [G, ...] models in float64, floats only: updates are differences from them
    told: Memory  # [G, ...]
    difference: Mapping[str, Tree] = {}  # for clients elsewhere that had the model before: packed


def exact_model(model: Tree) -> Tree:
    """The floats of a model in float64: updates are differences from them."""
    floats = {name: t for name, t in model.items() if t.is_floating_point()}
    return converted(floats, torch.float64)  # always a copy: the server updates it in place


@dataclass(frozen=True)
class Work:
    """What belongs to each of C clients alone: its plan, its key, its facts, its memory."""

    plan: Plan
    keys: Tensor  # [C]
    facts: Facts
    memory: Sequence[Memory]  # of each client
    shares: Tensor  # [C] float64
    cohort: Cohort  # these C clients, as the server sees them
    cohort_sizes: tuple[int, ...]  # clients of each experiment, also those in other blocks
    rounds: tuple[int, ...]  # the round of each experiment, counted from 0
    group: Tensor | None = None
    """[C] The row of `Shared` that each client gets: in a sweep that of its experiment, otherwise
    that of the version of the model that it started from."""

    def __len__(self) -> int:
        return self.keys.shape[0]  # a tensor's own len() takes four times as long

    def rows(self, which: slice | Tensor) -> Work:
        listed = range(len(self))[which] if isinstance(which, slice) else which.tolist()
        rest: Work = map_tensors(replace(self, memory=()), lambda t: t[which])
        return replace(rest, memory=[self.memory[row] for row in listed])

    @classmethod
    def joint(cls, works: Sequence[Work]) -> Work:
        """The work of several experiments, with the clients of one after those of another."""
        if len(works) == 1:
            return works[0]
        return cls(
            plan=_joint_plan([work.plan for work in works]),
            keys=torch.cat([work.keys for work in works]),
            facts=join([work.facts for work in works]),
            memory=[memory for work in works for memory in work.memory],
            shares=torch.cat([work.shares for work in works]),
            cohort=_joint_cohort([work.cohort for work in works]),
            cohort_sizes=tuple(map(len, works)),
            rounds=tuple(round for work in works for round in work.rounds),
            group=torch.arange(len(works)).repeat_interleave(torch.tensor([*map(len, works)])),
        )

    @property
    def spans(self) -> Spans:
        """Each experiment with its first row and the row after its last."""
        if self.group is None or len(self.cohort_sizes) == 1:
            return ((0, 0, len(self)),)
        found, start = [], 0
        for group, count in sorted(Counter(self.group.tolist()).items()):
            found.append((group, start, start + count))
            start += count
        return tuple(found)


def work_alone(plan: Plan, keys: Tensor, facts: Facts, memory: Memory) -> Work:
    """The work of clients that know nothing about the rest of the cohort."""
    count = len(keys)
    ones = torch.ones(count, dtype=torch.float64)
    cohort = Cohort(
        clients=torch.zeros(count, dtype=torch.int64),
        sizes=facts.size,
        steps=plan.steps,
        size_shares=ones,
        label_shares=None,
        num_clients=count,
        num_examples=int(facts.size.sum()),
    )
    return Work(
        plan, keys, facts, [memory] * count, ones, cohort, cohort_sizes=(count,), rounds=(0,)
    )


Span = tuple[int, int, int]
Spans = tuple[Span, ...]


class Part(NamedTuple):
    """What comes back from some clients of a cohort, in the order they were given."""

    update: Tree  # the result of `combine` if `combined`, otherwise [C, ...]
    counters: Tree  # integer buffers: the maximum over the clients
    extra: Memory  # summed over them
    keep: Sequence[Memory]  # of each client
    scalars: Mapping[str, Tensor]  # [C] each; `loss` is the mean training loss
    combined: bool
    borrowed: bool  # whether other parts will overwrite the memory of `update`
    group: int = 0  # which experiment of a sweep they belong to
    channel_scalars: Mapping[str, Tensor] = {}  # [C] each, of which plain means are recorded
    notes: Mapping[str, Tree] = {}  # [C, ...] what packs updates, if they are not combined here

    @property
    def num_clients(self) -> int:
        return len(self.scalars["loss"])


class ClientInputs(NamedTuple):
    """`Work` in the form for training, on the model's device: clients with more steps come first.

    So clients that have finished are cut off at the end. `shares` and `cohort` are used after
    training, in the order of the cohort; `to_cohort` is the permutation that brings the other
    fields into that order (None: they are in it already).
    """

    plan: Plan
    clients: Tensor  # [C]
    keys: Tensor  # [C]
    dropout_keys: Tensor  # [C, T]
    facts: Facts
    steps: Tensor  # [C]
    group: Tensor | None  # [C]
    to_cohort: Tensor | None  # [C]
    shares: Tensor  # [C] float64
    cohort: Cohort
    cohort_sizes: tuple[int, ...]
    memory: Sequence[Memory]  # of each client; empty if none remembers anything
    numbers: Tensor | None = None  # [P, G] float64: see `algorithm.numbers_of`

    @classmethod
    def of(cls, work: Work, numbers: Sequence[Sequence[float]] | None = None) -> ClientInputs:
        steps, to_cohort, mine = work.plan.steps, None, work
        listed = steps.numpy()
        if (listed[1:] > listed[:-1]).any():
            order = steps.argsort(descending=True, stable=True)
            steps, to_cohort, mine = steps[order], order.argsort(), work.rows(order)
        num_steps = np.arange(mine.plan.index.shape[1])
        # By NumPy: on a GPU it would take thirty small kernels.
        by_step = keys.fold(mine.keys.numpy()[:, None], DROPOUT, num_steps)
        return cls(
            plan=mine.plan,
            clients=mine.cohort.clients,
            keys=mine.keys,
            dropout_keys=torch.from_numpy(by_step),
            facts=mine.facts,
            steps=steps,
            group=mine.group,
            to_cohort=to_cohort,
            shares=work.shares,
            cohort=work.cohort,
            cohort_sizes=work.cohort_sizes,
            memory=mine.memory if any(mine.memory) else (),
            numbers=None if numbers is None else torch.from_numpy(np.array(numbers, np.float64)),
        )

    def cohort_of(self, rows: slice) -> Cohort:
        """The clients of one experiment, which are these rows of the cohort."""
        if len(self.cohort_sizes) == 1:
            return self.cohort
        mine: Cohort = map_tensors(self.cohort, itemgetter(rows))
        counts: Any = {name: getattr(mine, name)[0] for name in COUNTS}
        return mine._replace(**counts)


Shapes = tuple[torch.Size, ...]


class PackedInputs(NamedTuple):
    """`ClientInputs` packed for the transfer to a device: all numbers in one tensor, one copy."""

    numbers: Tensor  # int64
    memory: Sequence[Memory]

    @classmethod
    def of(
        cls, inputs: ClientInputs, device: torch.device
    ) -> tuple[PackedInputs, Callable[[PackedInputs], ClientInputs], Shapes]:
        """The packed inputs, a function that unpacks them there, and the shapes it is valid for."""
        cohort = inputs.cohort
        if len(inputs.cohort_sizes) == 1:  # a recorded round reads only tensors
            counts: Any = {
                name: torch.from_numpy(np.array(getattr(cohort, name), np.int64)) for name in COUNTS
            }
            cohort = cohort._replace(**counts)
        like = inputs._replace(memory=(), cohort=cohort)
        tensors = tensors_in(like)
        flat = [t.numpy().ravel().view(np.int64) for t in tensors]  # float64 keeps its bits
        packed = cls(moved(torch.from_numpy(np.concatenate(flat)), device), inputs.memory)
        return packed, partial(_unpacked, like), tuple(t.shape for t in tensors)


def _unpacked(like: ClientInputs, packed: PackedInputs) -> ClientInputs:
    tensors = tensors_in(like)
    parts = torch.split(packed.numbers, [t.numel() for t in tensors])
    views = (part.view(t.dtype).view(t.shape) for part, t in zip(parts, tensors, strict=True))
    inputs: ClientInputs = with_tensors(like, views)
    return inputs._replace(memory=packed.memory)


def _joint_cohort(cohorts: Sequence[Cohort]) -> Cohort:
    """Cohorts as one, with a row for each client in place of counts.

    Label shares that an experiment does not disclose are NaN.
    """
    disclosed = [cohort.label_shares for cohort in cohorts if cohort.label_shares is not None]
    rows = []
    for cohort in cohorts:
        size = len(cohort.clients)
        own: dict[str, Any] = {name: torch.full((size,), getattr(cohort, name)) for name in COUNTS}
        if disclosed and cohort.label_shares is None:
            own["label_shares"] = disclosed[0].new_full((size, disclosed[0].shape[1]), torch.nan)
        rows.append(cohort._replace(**own))
    joint: Cohort = join(rows)
    return joint


def _joint_plan(plans: Sequence[Plan]) -> Plan:
    """Plans as one, one after another, padded to the longest and the widest."""
    steps, size = (max(plan.index.shape[axis] for plan in plans) for axis in (1, 2))
    index, counts = [], []
    for plan in plans:
        _, own_steps, own_size = plan.index.shape
        if (own_steps, own_size) != (steps, size):
            more = 0, size - own_size, 0, steps - own_steps
            plan = Plan(F.pad(plan.index, more), F.pad(plan.counts, more[2:]))
        index.append(plan.index)
        counts.append(plan.counts)
    known = any(plan.taken is not None for plan in plans)
    taken = torch.cat([plan.steps for plan in plans]) if known else None
    return Plan(torch.cat(index), torch.cat(counts), taken)
