"""What a round sends to clients, and what comes back: the messages between a server and them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
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
    memory: Memory  # [C, ...]
    shares: Tensor  # [C] float64
    cohort: Cohort  # these C clients, as the server sees them
    group: Tensor | None = None  # [C] which experiment of a sweep each belongs to

    def __len__(self) -> int:
        return len(self.keys)

    def rows(self, which: slice | Tensor) -> Work:
        rows: Work = map_tensors(self, lambda t: t[which])
        return rows

    @classmethod
    def together(cls, works: Sequence[Work]) -> Work:
        """The work of several experiments, the clients of one after those of another."""
        if len(works) == 1:
            return works[0]
        return cls(
            plan=_plans([work.plan for work in works]),
            keys=torch.cat([work.keys for work in works]),
            facts=join([work.facts for work in works]),
            memory=join([work.memory for work in works]),
            shares=torch.cat([work.shares for work in works]),
            cohort=join([_counts_by_row(work.cohort) for work in works]),
            group=torch.arange(len(works)).repeat_interleave(torch.tensor([*map(len, works)])),
        )

    def apart(self) -> Iterator[tuple[int, slice, Work]]:
        """Each experiment's clients by themselves, where they stand, and whose they are."""
        if self.group is None:
            yield 0, slice(None), self
            return
        start = 0
        for group, count in sorted(Counter(self.group.tolist()).items()):
            rows = slice(start, start + count)
            work = self.rows(rows)
            counts: Any = {name: int(getattr(work.cohort, name)[0]) for name in COUNTS}
            yield group, rows, replace(work, cohort=work.cohort._replace(**counts), group=None)
            start += count


class Part(NamedTuple):
    """What comes back from some clients of a cohort, in the order they were given."""

    update: Tree  # summed over them if `combine` is linear, else [C, ...]
    counters: Tree  # integer buffers: the greatest of theirs
    extra: Memory  # summed over them
    keep: Memory  # [C, ...]
    scalars: Mapping[str, Tensor]  # [C] each; `loss` is the mean training loss
    group: int = 0  # which experiment of a sweep they belong to


class Given(NamedTuple):
    """What local training takes of `Work`, where the model is."""

    plan: Plan
    keys: Tensor  # [C]
    facts: Facts
    steps: Tensor  # [C]
    memory: Memory  # [C, ...]
    group: Tensor | None  # [C]

    @classmethod
    def of(cls, work: Work, device: torch.device) -> Given:
        here = cls(work.plan, work.keys, work.facts, work.plan.steps, {}, work.group)
        there: Given = _at_once(here, device)
        return there._replace(memory=work.memory)


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
        index.append(F.pad(plan.index, (0, size - own_size, 0, steps - own_steps)))
        counts.append(F.pad(plan.counts, (0, steps - own_steps)))
    return Plan(torch.cat(index), torch.cat(counts))


def _at_once(numbers: Any, device: torch.device) -> Any:
    """Whole numbers on the device, in one copy for all of them."""
    if device.type == "cpu":
        return numbers
    there, start = moved(torch.cat([t.flatten() for t in tensors_in(numbers)]), device), 0

    def place(tensor: Tensor) -> Tensor:
        nonlocal start
        start += tensor.numel()
        part: Tensor = there[start - tensor.numel() : start]
        return part.view(tensor.shape)

    return map_tensors(numbers, place)
