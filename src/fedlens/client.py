"""What clients do in a round: the only place local training is written.

Straight-line tensor code over C clients side by side; C is 1 where an engine trains one after
another. No branch on a tensor's value, no `.item()`: how many steps each client takes, and how
many examples each batch holds, is known from the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedlens import keys
from fedlens.algorithm import Algorithm, pick
from fedlens.augment import Augment
from fedlens.core import Batch, Cohort, Examples, Facts, Local, Memory, Plan, Tree, tree_map
from fedlens.layout import Layout

Apply = Callable[[Tree, Tree, Tensor, Tensor, Tensor], tuple[Tensor, Tree]]
"""(params[C], buffers[C], images[C, B], keys[C], mask[C, B]) -> logits[C, B, L], buffers[C]."""

DROPOUT, AUGMENT = keys.purpose("dropout"), keys.purpose("augment")


class Shared(NamedTuple):
    """What every client of a cohort is sent alike."""

    params: Tree
    buffers: Tree
    exact: Tree  # both in float64, floats only: what updates are taken from
    told: Memory


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


class Part(NamedTuple):
    """What comes back from some clients of a cohort, in the order they were given."""

    update: Tree  # summed over them if `combine` is linear, else [C, ...]
    counters: Tree  # integer buffers: the greatest of theirs
    extra: Memory  # summed over them
    keep: Memory  # [C, ...]
    scalars: Mapping[str, Tensor]  # [C] each; `loss` is the mean training loss


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
    """Local training, upload and, where `combine` is linear, this part's share of the sum."""

    algorithm: Algorithm
    layout: Layout
    augment: Augment | None = None

    def __call__(
        self,
        apply: Apply,
        examples: Examples,
        shared: Shared,
        work: Work,
        execute: Execute | None = None,
    ) -> Part:
        steps = work.plan.steps
        if bool((steps[1:] <= steps[:-1]).all()):
            local, loss = self._train(apply, examples, shared, work, execute)
        else:
            # Clients with more steps first: those that are done are cut off the end.
            order = steps.argsort(descending=True, stable=True)
            local, loss = self._train(apply, examples, shared, work.rows(order), execute)
            back = order.argsort().to(loss.device)
            local, loss = map_tensors(local, lambda t: t if len(t) == 1 else t[back]), loss[back]
        with torch.no_grad():
            part = self._send(local, loss, work)
            if execute is not None:  # what clients keep must outlive the memory of the steps
                part = part._replace(keep=map_tensors(part.keep, torch.clone))
        return part

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
        take = partial(self._step, apply, examples, pick(self.algorithm, work.group))
        finished: list[Local] = []

        for step, (live, width) in enumerate(zip(*_cuts(plan), strict=True)):
            if live < len(local.steps):
                finished.append(_rows(local, slice(live, None)))
                local = _rows(local, slice(live))
                if work.group is not None:
                    algorithm = pick(self.algorithm, work.group[:live])
                    take = partial(self._step, apply, examples, algorithm)
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
        self, apply: Apply, examples: Examples, algorithm: Algorithm, local: Local, now: Inputs
    ) -> tuple[Local, Tensor]:
        """One step of every client; the loss is [C]."""
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
        clients = len(work)
        anchor = {name: p.unsqueeze(0) for name, p in shared.params.items()}
        params, buffers = (
            {name: t.expand(clients, *t.shape).clone() for name, t in tree.items()}
            for tree in (shared.params, shared.buffers)
        )
        for name, own in work.memory.get("norm", {}).items():
            (params if name in params else buffers)[name] = own.clone()
        solver = self.algorithm.solve.init(params)
        if not self.algorithm.reset:
            solver = {name: tree_map(torch.clone, work.memory[f"solver.{name}"]) for name in solver}
        device = next(iter(params.values())).device
        facts = Facts(*(fact.to(device) for fact in work.facts))
        steps = work.plan.steps.to(device)
        exact = {name: t.unsqueeze(0) for name, t in shared.exact.items()}
        told = {n: {k: t.unsqueeze(0) for k, t in tree.items()} for n, tree in shared.told.items()}
        return Local(params, buffers, anchor, exact, told, facts, work.memory, solver, steps)

    def _send(self, local: Local, loss: Tensor, work: Work) -> Part:
        algorithm = pick(self.algorithm, work.group)
        upload = algorithm.upload(local)
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
        return Part(update, counters, sums, keep, {"loss": loss, **upload.scalars})

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

    def join(values: list[Any]) -> Any:
        if isinstance(values[0], Tensor):
            return torch.cat(values)
        if isinstance(values[0], dict):
            return {name: join([value[name] for value in values]) for name in values[0]}
        return type(values[0])(*(join(list(columns)) for columns in zip(*values, strict=True)))

    joined = {
        name: join([getattr(part, name) for part in parts])
        for name in ("params", "buffers", "facts", "memory", "solver", "steps")
    }
    return replace(first, **joined)


def _cuts(plan: Plan) -> tuple[list[int], list[int]]:
    """For each step, how many clients still train, and how many examples their batches hold."""
    lives = (plan.counts > 0).sum(0)
    num_steps = int((lives > 0).sum())
    widths = plan.counts.amax(0) if len(plan.counts) else lives
    return lives[:num_steps].tolist(), widths[:num_steps].tolist()
