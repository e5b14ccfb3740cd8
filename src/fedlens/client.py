"""What clients do in a round: the only place local training is written.

Straight-line tensor code over C clients side by side; C is 1 where an engine trains one after
another. No branch on a tensor's value, no `.item()`: how many steps each client takes, and how
many examples each batch holds, is known from the plan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fedlens import keys
from fedlens.algorithm import Algorithm, pick, side_by_side
from fedlens.augment import Augment
from fedlens.core import Batch, Cohort, Examples, Facts, Local, Memory, Plan, Tree, tree_map
from fedlens.layout import Layout

Apply = Callable[[Tree, Tree, Tensor, Tensor, Tensor], tuple[Tensor, Tree]]
"""(params[C], buffers[C], images[C, B], keys[C], mask[C, B]) -> logits[C, B, L], buffers[C]."""

DROPOUT, AUGMENT = keys.purpose("dropout"), keys.purpose("augment")


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
            facts=_join([work.facts for work in works]),
            memory=_join([work.memory for work in works]),
            shares=torch.cat([work.shares for work in works]),
            cohort=_join([_counts_by_row(work.cohort) for work in works]),
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


class Inputs(NamedTuple):
    """What one step of C clients takes from their plan."""

    chosen: Tensor  # [C, B] positions in Examples
    labels: Tensor  # [C, B]
    mask: Tensor  # [C, B]
    counts: Tensor  # [C]
    dropout_keys: Tensor  # [C]
    augment_keys: Tensor  # [C]
    step: Tensor  # []


Step = Callable[[Local, Inputs], tuple[Local, Tensor]]
Execute = Callable[[Step, Local, Inputs], tuple[Local, Tensor]]
"""How an engine takes a step, if not simply by taking it. What it gives back may be overwritten by
the next block of clients, but not by this one."""


@dataclass(frozen=True)
class ClientProgram:
    """Local training, upload and, where `combine` is linear, this part's share of the sum.

    Of a sweep, `algorithm` has numbers [G], and `each` has the algorithms one by one.
    """

    algorithm: Algorithm
    layout: Layout
    augment: Augment | None = None
    each: tuple[Algorithm, ...] = ()

    @classmethod
    def together(cls, programs: Sequence[ClientProgram], like: Tensor) -> ClientProgram:
        """One program for the clients of several experiments, that differ in numbers alone.

        Only what clients compute step by step is done side by side; each has its own algorithm
        for the rest. `like` has the dtype and the device of the parameters.
        """
        first, each = programs[0], tuple(program.algorithm for program in programs)
        if len(each) == 1:
            return first
        algorithm = replace(
            first.algorithm,
            objective=side_by_side([one.objective for one in each], like),
            solve=side_by_side([one.solve for one in each], like),
        )
        return replace(first, algorithm=algorithm, each=each)

    def __call__(
        self,
        apply: Apply,
        examples: Examples,
        shared: Shared,
        work: Work,
        execute: Execute | None = None,
    ) -> list[Part]:
        """What some clients send: a part for each experiment that there are clients of."""
        steps = work.plan.steps
        if bool((steps[1:] <= steps[:-1]).all()):
            local, loss = self._train(apply, examples, shared, work, execute)
        else:
            # Clients with more steps first: those that are done are cut off the end.
            order = steps.argsort(descending=True, stable=True)
            local, loss = self._train(apply, examples, shared, work.rows(order), execute)
            back = order.argsort().to(loss.device)
            local, loss = map_tensors(local, lambda t: t if len(t) == 1 else t[back]), loss[back]
        parts = []
        with torch.no_grad():
            for group, rows, mine in work.apart():
                some = local if work.group is None else map_tensors(local, itemgetter(rows))
                part = self._send(some, loss[rows], mine, shared, group)
                if execute is not None:  # what clients keep must outlive the memory of the steps
                    part = part._replace(keep=map_tensors(part.keep, torch.clone))
                parts.append(part)
        return parts

    def _train(
        self,
        apply: Apply,
        examples: Examples,
        shared: Shared,
        work: Work,
        execute: Execute | None,
    ) -> tuple[Local, Tensor]:
        device, plan = examples.labels.device, work.plan
        local = self._start(shared, work)
        dtype = next(iter(local.params.values())).dtype
        index, counts = plan.index.to(device), plan.counts.to(device)
        labels = examples.labels[index]
        mask = (torch.arange(index.shape[2], device=device) < counts[:, :, None]).to(dtype)
        steps = torch.arange(index.shape[1])
        dropout_keys = keys.fold(work.keys[:, None], DROPOUT, steps).to(device)  # [C, T]
        augment_keys = keys.fold(work.keys[:, None], AUGMENT, steps).to(device)
        steps = steps.to(device)
        total = torch.zeros(len(work), dtype=dtype, device=device)
        take = partial(self._step, apply, examples)
        finished: list[Local] = []

        for step, (live, width) in enumerate(zip(*_cuts(plan), strict=True)):
            if live < len(local.steps):
                finished.append(_rows(local, slice(live, None)))
                local = _rows(local, slice(live))
            rows = (slice(live), step)
            if execute is not None:
                width = index.shape[2]  # one shape for every step; the mask tells
            now = Inputs(
                chosen=index[rows][:, :width],
                labels=labels[rows][:, :width],
                mask=mask[rows][:, :width],
                counts=counts[rows],
                dropout_keys=dropout_keys[rows],
                augment_keys=augment_keys[rows],
                step=steps[step],
            )
            local, loss = take(local, now) if execute is None else execute(take, local, now)
            total[:live] += loss * now.counts

        whole = _concatenate([local, *reversed(finished)]) if finished else local
        whole.params = {name: p.detach() for name, p in whole.params.items()}
        whole.step = whole.count = whole.loss = None
        return whole, total / counts.sum(1).clamp(min=1)

    def _step(
        self, apply: Apply, examples: Examples, local: Local, now: Inputs
    ) -> tuple[Local, Tensor]:
        """One step of every client; the loss is [C]."""
        algorithm = pick(self.algorithm, local.group)
        images = examples.read(now.chosen.flatten())
        images = images.view(*now.chosen.shape, *images.shape[1:])
        if self.augment is not None:
            images = self.augment(images, now.augment_keys)
        batch = Batch(images, now.labels, now.mask)
        leaves = [p.requires_grad_() for p in local.params.values()]
        logits, local.buffers = apply(
            local.params, local.buffers, batch.images, now.dropout_keys, batch.mask
        )
        loss, plain = algorithm.objective(logits, batch, local)
        local.step, local.count, local.loss = now.step, now.counts, plain
        slopes = torch.autograd.grad(loss.sum(), leaves, materialize_grads=True)
        grads = dict(zip(local.params, slopes, strict=True))
        with torch.no_grad():
            local.params, local.solver = algorithm.solve.update(
                grads, local.solver, local.params, local
            )
        return local, plain

    def _start(self, shared: Shared, work: Work) -> Local:
        """Where local training starts: the server's model, and what the client remembers."""
        clients, device = len(work), next(iter(shared.params.values())).device
        anchor, told, group = shared.params, shared.told, work.group
        if group is None:
            params, buffers = (
                {name: t.expand(clients, *t.shape[1:]).clone() for name, t in tree.items()}
                for tree in (shared.params, shared.buffers)
            )
        else:
            group = group.to(device)
            anchor, told, params, buffers = map_tensors(
                (shared.params, shared.told, shared.params, shared.buffers), lambda t: t[group]
            )
        for name, own in work.memory.get("norm", {}).items():
            (params if name in params else buffers)[name] = own.clone()
        solver = pick(self.algorithm.solve, group).init(params)
        if not self.algorithm.reset:
            solver = {name: tree_map(torch.clone, work.memory[f"solver.{name}"]) for name in solver}
        facts = Facts(*(fact.to(device) for fact in work.facts))
        steps = work.plan.steps.to(device)
        return Local(params, buffers, anchor, {}, told, facts, work.memory, solver, steps, group)

    def _send(self, local: Local, loss: Tensor, work: Work, shared: Shared, group: int) -> Part:
        """What clients of one experiment send."""
        algorithm = self.each[group] if self.each else self.algorithm
        exact = {name: t[group : group + 1] for name, t in shared.exact.items()}
        upload = algorithm.upload(replace(local, exact=exact))
        update, keep = upload.update, upload.keep
        if not algorithm.reset:
            keep = keep | {f"solver.{name}": tree for name, tree in local.solver.items()}
        if algorithm.personal_norm:
            model = local.params | local.buffers
            keep = keep | {"norm": {name: model[name] for name in self.layout.norm_names}}
        if algorithm.combine.linear:
            update = algorithm.combine(update, work.shares, work.cohort, self.layout)
        counters = {
            name: b.amax(0) for name, b in local.buffers.items() if not b.is_floating_point()
        }
        sums = {n: {k: t.sum(0) for k, t in tree.items()} for n, tree in upload.extra.items()}
        return Part(update, counters, sums, keep, {"loss": loss, **upload.scalars}, group)

    def memory(self, params: Tree, buffers: Tree, told: Memory) -> Memory:
        """What a client never seen remembers, for everything that clients remember."""
        algorithm = self.algorithm
        memory = {name: first(params, told) for name, first in algorithm.memory.items()}
        if not algorithm.reset:
            memory |= {f"solver.{name}": t for name, t in algorithm.solve.init(params).items()}
        if algorithm.personal_norm:
            model = params | buffers
            memory["norm"] = {name: model[name] for name in self.layout.norm_names}
        return memory


def map_tensors(value: Any, fn: Callable[[Tensor], Tensor]) -> Any:
    """`value` with `fn` applied to every tensor in it, down through dicts and records."""
    if isinstance(value, Tensor):
        return fn(value)
    if isinstance(value, dict):
        return {name: map_tensors(part, fn) for name, part in value.items()}
    if isinstance(value, tuple):
        parts = [map_tensors(part, fn) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if hasattr(value, "__dataclass_fields__"):
        names = value.__dataclass_fields__
        return type(value)(**{name: map_tensors(getattr(value, name), fn) for name in names})
    return value


def _rows(local: Local, which: slice) -> Local:
    """Some clients of `local`; what all share, with a leading axis of 1, stays as it is."""
    clients = len(local.steps)
    local = replace(local, step=None, count=None, loss=None)
    rows: Local = map_tensors(local, lambda t: t[which].clone() if len(t) == clients else t)
    return rows


def _concatenate(parts: list[Local]) -> Local:
    first = parts[0]
    names = ["params", "buffers", "facts", "memory", "solver", "steps"]
    if first.group is not None:
        names += ["anchor", "told", "group"]
    return replace(
        first, **{name: _join([getattr(part, name) for part in parts]) for name in names}
    )


def _join(values: Sequence[Any]) -> Any:
    """Rows of tensors one after another, down through dicts and tuples with names."""
    first = values[0]
    if isinstance(first, Tensor):
        return torch.cat(list(values))
    if isinstance(first, dict):
        return {name: _join([value[name] for value in values]) for name in first}
    if first is None:
        return None
    return type(first)(*map(_join, zip(*values, strict=True)))


COUNTS = ("num_clients", "num_examples", "num_examples_seen")  # of a Cohort


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


def _cuts(plan: Plan) -> tuple[list[int], list[int]]:
    """For each step, how many clients still train, and how many examples their batches hold."""
    lives = (plan.counts > 0).sum(0)
    num_steps = int((lives > 0).sum())
    widths = plan.counts.amax(0) if len(plan.counts) else lives
    return lives[:num_steps].tolist(), widths[:num_steps].tolist()
