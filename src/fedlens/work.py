"""What a round sends to clients, and what comes back: the messages between a server and them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fedlens.core import Cohort, Facts, Memory, Plan, Tree
from fedlens.trees import join, map_tensors, moved, tensors_in

COUNTS = ("num_clients", "num_examples", "num_examples_seen")  # of a Cohort


class Shared(NamedTuple):
    """What every client of a cohort is sent alike, with a leading axis of experiments."""

    params: Tree  # [G, ...]
    buffers: Tree  # [G, ...]
    exact: Tree  # [G, ...] both in float64, floats only: what updates are taken from
    told: Memory  # [G, ...]


@dataclass(frozen=True)
class Work:
    """What each of C clients has for itself: its plan, its key, its facts, its memory."""

    plan: Plan
    keys: Tensor  # [C]
    facts: Facts
    memory: Sequence[Memory]  # of each client
    shares: Tensor  # [C] float64
    cohort: Cohort  # these C clients, as the server sees them
    cohort_sizes: tuple[int, ...]  # how many clients each experiment has, in other blocks too
    group: Tensor | None = None  # [C] which experiment of a sweep each belongs to

    def __len__(self) -> int:
        return len(self.keys)

    def rows(self, which: slice | Tensor) -> Work:
        listed = range(len(self))[which] if isinstance(which, slice) else which.tolist()
        rest: Work = map_tensors(replace(self, memory=()), lambda t: t[which])
        return replace(rest, memory=[self.memory[row] for row in listed])

    @classmethod
    def joint(cls, works: Sequence[Work]) -> Work:
        """The work of several experiments, the clients of one after those of another."""
        if len(works) == 1:
            return works[0]
        return cls(
            plan=_plans([work.plan for work in works]),
            keys=torch.cat([work.keys for work in works]),
            facts=join([work.facts for work in works]),
            memory=[memory for work in works for memory in work.memory],
            shares=torch.cat([work.shares for work in works]),
            cohort=join([_counts_by_row(work.cohort) for work in works]),
            cohort_sizes=tuple(map(len, works)),
            group=torch.arange(len(works)).repeat_interleave(torch.tensor([*map(len, works)])),
        )

    @property
    def spans(self) -> Spans:
        """Each experiment, with the first of its rows and the one after the last."""
        if self.group is None:
            return ((0, 0, len(self)),)
        found, start = [], 0
        for group, count in sorted(Counter(self.group.tolist()).items()):
            found.append((group, start, start + count))
            start += count
        return tuple(found)


Span = tuple[int, int, int]
Spans = tuple[Span, ...]


def rows_of(cohort: Cohort, rows: slice) -> Cohort:
    """The clients of one experiment, of a cohort joined from those of several."""
    mine: Cohort = map_tensors(cohort, itemgetter(rows))
    counts: Any = {name: getattr(mine, name)[0] for name in COUNTS}
    return mine._replace(**counts)


class Part(NamedTuple):
    """What comes back from some clients of a cohort, in the order they were given."""

    update: Tree  # what `combine` makes of them, if it is linear or they are all; else [C, ...]
    counters: Tree  # integer buffers: the greatest of theirs
    extra: Memory  # summed over them
    keep: Sequence[Memory]  # of each client
    scalars: Mapping[str, Tensor]  # [C] each; `loss` is the mean training loss
    combined: bool
    lent: bool  # whether `update` lies in memory that other parts are written to
    group: int = 0  # which experiment of a sweep they belong to


class Given(NamedTuple):
    """`Work` as clients train on it, where the model is: those with more steps come first.

    So those that are done are cut off the end. `shares` and `cohort` are for when all are done, in
    the order of the cohort, which `back` brings the others to; None: they are in it.
    """

    plan: Plan
    keys: Tensor  # [C]
    facts: Facts
    steps: Tensor  # [C]
    group: Tensor | None  # [C]
    back: Tensor | None  # [C]
    shares: Tensor  # [C] float64
    cohort: Cohort
    cohort_sizes: tuple[int, ...]
    memory: Sequence[Memory]  # of each client; empty if none remembers anything

    @classmethod
    def of(cls, work: Work) -> Given:
        steps, back, mine = work.plan.steps, None, work
        if not bool((steps[1:] <= steps[:-1]).all()):
            order = steps.argsort(descending=True, stable=True)
            steps, back, mine = steps[order], order.argsort(), work.rows(order)
        plan, facts = mine.plan, mine.facts
        after = work.shares, work.cohort, work.cohort_sizes
        memory = mine.memory if any(mine.memory) else ()
        return cls(plan, mine.keys, facts, steps, mine.group, back, *after, memory)


Shapes = tuple[torch.Size, ...]


class Packed(NamedTuple):
    """`Given` on its way to a device: all numbers in one tensor, which is one copy."""

    numbers: Tensor  # int64
    memory: Sequence[Memory]

    @classmethod
    def of(
        cls, given: Given, device: torch.device
    ) -> tuple[Packed, Callable[[Packed], Given], Shapes]:
        """It, and how to open it there: the same for all of these shapes."""
        cohort = given.cohort
        if given.group is None:  # what is recorded reads tensors alone
            counts: Any = {name: torch.tensor(getattr(cohort, name)) for name in COUNTS}
            cohort = cohort._replace(**counts)
        shape = given._replace(memory=(), cohort=cohort)
        all_of_it = tensors_in(shape)
        flat = [t.flatten().view(torch.int64) for t in all_of_it]  # or float64, bit by bit
        packed = cls(moved(torch.cat(flat), device), given.memory)
        return packed, partial(_opened, shape), tuple(t.shape for t in all_of_it)


def _opened(shape: Given, packed: Packed) -> Given:
    start = 0

    def place(tensor: Tensor) -> Tensor:
        nonlocal start
        start += tensor.numel()
        part = packed.numbers[start - tensor.numel() : start]
        return part.view(tensor.dtype).view(tensor.shape)

    given: Given = map_tensors(shape, place)
    return given._replace(memory=packed.memory)


def _counts_by_row(cohort: Cohort) -> Cohort:
    """With a row for each client in place of counts: rows of several experiments can be joined."""
    rows: dict[str, Any] = {
        name: torch.full((len(cohort.clients),), getattr(cohort, name)) for name in COUNTS
    }
    return cohort._replace(**rows)


def _plans(plans: Sequence[Plan]) -> Plan:
    """Plans one after another, padded to the longest and the widest."""
    steps, size = (max(plan.index.shape[axis] for plan in plans) for axis in (1, 2))
    index, counts = [], []
    for plan in plans:
        _, own_steps, own_size = plan.index.shape
        if (own_steps, own_size) != (steps, size):
            more = 0, size - own_size, 0, steps - own_steps
            plan = Plan(F.pad(plan.index, more), F.pad(plan.counts, more[2:]))
        index.append(plan.index)
        counts.append(plan.counts)
    return Plan(torch.cat(index), torch.cat(counts))
