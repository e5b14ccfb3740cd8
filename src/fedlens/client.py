"""What clients do in a round: the only place local training is written.

Straight-line tensor code over C clients side by side; C is 1 where an engine trains one after
another. No branch on a tensor's value, no `.item()`: how many steps each client takes, and how
many examples each batch holds, is known from the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from fedlens import keys
from fedlens.algorithm import Algorithm, pick, side_by_side
from fedlens.augment import Augment
from fedlens.core import Batch, Contraction, Examples, Local, Memory, Plan, Tree, Upload, tree_map
from fedlens.network.layout import Layout
from fedlens.network.model import Model
from fedlens.network.ops import local_step_
from fedlens.trees import copies, copy_tensors, in_order, join, map_tensors, stack, unstack
from fedlens.work import Given, Packed, Part, Shared, Span, Spans, Work, rows_of

Step = Callable[[Local, "Inputs"], tuple[Local, Tensor]]

DROPOUT, AUGMENT = keys.purpose("dropout"), keys.purpose("augment")


class Inputs(NamedTuple):
    """What one step of C clients takes from their plan."""

    chosen: Tensor  # [C, B] positions in Examples
    labels: Tensor  # [C, B]
    mask: Tensor  # [C, B]
    counts: Tensor  # [C]
    dropout_keys: Tensor  # [C]
    augment_keys: Tensor  # [C]
    ones: Tensor  # [C] the slopes of everyone's loss
    step: Tensor  # []


T = TypeVar("T")


class Record(Protocol):
    """How an engine makes fast what comes again and again in the same shape.

    It gives what `function` gives for these tensors, or None if it was not seen often enough. The
    result may be overwritten by the next call with the same key; `function` reads no tensor that
    is not given to it, but those that stay in their place for as long as the key is used.
    """

    def __call__(self, key: object, function: Callable[..., T], *inputs: Any) -> T | None: ...


@dataclass(frozen=True)
class ClientProgram:
    """Local training, upload and, where `combine` is linear or all are here, what it makes of them.

    Of a sweep, `algorithm` has numbers [G], and `each` has the algorithms one by one.
    """

    algorithm: Algorithm
    layout: Layout
    augment: Augment | None = None
    each: tuple[Algorithm, ...] = ()

    @classmethod
    def joint(cls, programs: Sequence[ClientProgram], like: Tensor) -> ClientProgram:
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
        model: Model,
        examples: Examples,
        shared: Shared,
        work: Work,
        record: Record | None = None,
    ) -> list[Part]:
        """What some clients send: a part for each experiment that there are clients of."""
        known, given = examples.labels, Given.of(work)
        shape, spans = cuts(work.plan), work.spans
        take = partial(self._step, model, examples)
        if record is None and known.device.type == "cpu":
            return lasting(self._round(known, shape, spans, take, shared, given))
        packed, opened, shapes = Packed.of(given, known.device)

        def whole(shared: Shared, packed: Packed) -> list[Part]:
            return self._round(known, shape, spans, take, shared, opened(packed))

        if record is None:
            return lasting(whole(shared, packed))
        key = "round", shape, spans, shapes, work.cohort_sizes
        parts = record(key, whole, shared, packed)
        if parts is None:
            width = work.plan.index.shape[2]
            full = shape[0], (width,) * len(shape[1])  # one shape for every step

            def one(local: Local, now: Inputs) -> tuple[Local, Tensor]:
                before = replace(local, step=None, count=None, loss=None)
                done = record("step", partial(_in_place, take), before, now)
                # The next step writes over the loss; where it leaves the model, that goes on.
                return take(local, now) if done is None else (done[0], done[1].clone())

            return lasting(self._round(known, full, spans, one, shared, opened(packed)))
        return lasting(parts, recorded=True)

    def _round(
        self, known: Tensor, cuts: Cuts, spans: Spans, take: Step, shared: Shared, given: Given
    ) -> list[Part]:
        """All steps of all clients, and what they send."""
        local, loss = self._steps(known, cuts, take, shared._replace(exact={}), given)
        if given.back is not None:
            back = given.back
            local, loss = map_tensors(local, lambda t: t if len(t) == 1 else t[back]), loss[back]
        with torch.no_grad():
            uploads = self._uploads(spans, local, shared.exact)
            sent = zip(spans, uploads, strict=True)
            return [self._send(span, upload, local, loss, given) for span, upload in sent]

    def _steps(
        self, known: Tensor, cuts: Cuts, take: Step, shared: Shared, given: Given
    ) -> tuple[Local, Tensor]:
        """Where clients are after their steps, and their mean loss."""
        local = self._start(shared, given)
        step_of_all = self.algorithm.contraction
        if step_of_all is not None and step_of_all.drift is not None:
            drift = step_of_all.drift
            local.drift = {  # as parameters lie in memory
                name: torch.empty_like(p).copy_(drift(local, name))
                for name, p in local.params.items()
            }
        dtype, device = next(iter(local.params.values())).dtype, known.device
        index, counts = given.plan.index, given.plan.counts
        labels = known[index]
        mask = (torch.arange(index.shape[2], device=device) < counts[:, :, None]).to(dtype)
        steps = torch.arange(index.shape[1], device=device)
        dropout_keys = keys.fold(given.keys[:, None], DROPOUT, steps)  # [C, T]
        augment_keys = dropout_keys
        if self.augment is not None:
            augment_keys = keys.fold(given.keys[:, None], AUGMENT, steps)
        ones = torch.ones(len(index), dtype=dtype, device=device)
        losses: list[Tensor] = []
        finished: list[Local] = []

        for step, (live, width) in enumerate(zip(*cuts, strict=True)):
            if live < len(local.steps):
                finished.append(_rows(local, slice(live, None)))
                local = _rows(local, slice(live))
            rows = (slice(live), step)
            now = Inputs(
                chosen=index[rows][:, :width],
                labels=labels[rows][:, :width],
                mask=mask[rows][:, :width],
                counts=counts[rows],
                dropout_keys=dropout_keys[rows],
                augment_keys=augment_keys[rows],
                ones=ones[:live],
                step=steps[step],
            )
            local, loss = take(local, now)
            losses.append(loss if live == len(index) else F.pad(loss, (0, len(index) - live)))

        whole = _concatenate([local, *reversed(finished)]) if finished else local
        params = {name: p.detach() for name, p in whole.params.items()}
        # Not in place: what is recorded may own it.
        whole = replace(whole, params=params, step=None, count=None, loss=None, drift={})
        total = counts.new_zeros(len(index), dtype=dtype)
        if losses:
            total = (torch.stack(losses, 1) * counts[:, : len(losses)]).sum(1)
        return whole, total / counts.sum(1).clamp(min=1)

    def _step(
        self, model: Model, examples: Examples, local: Local, now: Inputs
    ) -> tuple[Local, Tensor]:
        """One step of every client; the loss is [C]."""
        algorithm = pick(self.algorithm, local.group)
        images = examples.read(now.chosen.flatten())
        images = images.view(*now.chosen.shape, *images.shape[1:])
        if self.augment is not None:
            images = self.augment(images, now.augment_keys)
        batch = Batch(images, now.labels, now.mask)
        params = local.params
        for p in params.values():
            p.requires_grad_()
        logits, local.buffers = model(
            params, local.buffers, batch.images, now.dropout_keys, batch.mask
        )
        objective, step = algorithm.objective, algorithm.contraction
        contracts = step is not None and not step.is_plain
        if contracts:  # the step itself does what penalties do
            objective = replace(objective, penalties=())
        loss, plain = objective(logits, batch, local)
        local.step, local.count, local.loss = now.step, now.counts, plain
        # Layers that have taken their step have no gradients left to give.
        slopes = torch.autograd.grad(
            loss,
            list(params.values()),
            now.ones.to(loss),
            allow_unused=True,
            materialize_grads=not model.takes_steps,
        )
        grads = {name: g for name, g in zip(params, slopes, strict=True) if g is not None}
        if grads:
            others = after = {name: params[name] for name in grads}
            with torch.no_grad():
                if contracts:
                    move = cast(Contraction, step)
                    local_step_(others, grads, local.anchor, local.drift, move.lr, move.keep)
                else:
                    after, local.solver = algorithm.solve.update(grads, local.solver, others, local)
            local.params = {name: after.get(name, p) for name, p in params.items()}
        return local, plain

    def _start(self, shared: Shared, given: Given) -> Local:
        """Where local training starts: the server's model, and what the client remembers."""
        clients, memory = len(given.keys), stack(given.memory)
        anchor, told, group = shared.params, shared.told, given.group
        if group is None:
            params, buffers = (
                {name: t.expand(clients, *t.shape[1:]).clone() for name, t in tree.items()}
                for tree in (shared.params, shared.buffers)
            )
        else:
            anchor, told, params, buffers = map_tensors(
                (shared.params, shared.told, shared.params, shared.buffers), lambda t: t[group]
            )
        for name, own in memory.get("norm", {}).items():
            (params if name in params else buffers)[name] = own.clone()
        solver = pick(self.algorithm.solve, group).init(params)
        if not self.algorithm.reset:
            solver = {name: tree_map(torch.clone, memory[f"solver.{name}"]) for name in solver}
        mine = given.facts, memory, solver, given.steps, group
        return Local(params, buffers, anchor, {}, told, *mine)

    def _uploads(self, spans: Spans, local: Local, exact: Tree) -> list[Upload]:
        """What clients send, experiment by experiment."""
        if local.group is None:
            return [self.algorithm.upload(replace(local, exact=exact))]
        found = []
        for group, first, end in spans:
            mine: Local = map_tensors(local, itemgetter(slice(first, end)))
            mine.exact = {name: t[group : group + 1] for name, t in exact.items()}
            found.append((self.each[group] if self.each else self.algorithm).upload(mine))
        return found

    def _send(self, span: Span, upload: Upload, local: Local, loss: Tensor, given: Given) -> Part:
        """What comes back from the clients of one experiment."""
        (group, first, end), shares, cohort = span, given.shares, given.cohort
        if given.group is not None:
            rows = slice(first, end)
            local, loss, shares = map_tensors((local, loss, shares), itemgetter(rows))
            cohort = rows_of(cohort, rows)
        algorithm = self.each[group] if self.each else self.algorithm
        update, keep = upload.update, upload.keep
        if not algorithm.reset:
            keep = keep | {f"solver.{name}": tree for name, tree in local.solver.items()}
        if algorithm.personal_norm:
            model = local.params | local.buffers
            keep = keep | {"norm": {name: model[name] for name in self.layout.norm_names}}
        combined = algorithm.combine.linear or len(loss) == given.cohort_sizes[group]
        if combined:
            update = algorithm.combine(update, shares, cohort, self.layout)
        counters = {
            name: b.amax(0) for name, b in local.buffers.items() if not b.is_floating_point()
        }
        sums = {n: {k: t.sum(0) for k, t in tree.items()} for n, tree in upload.extra.items()}
        scalars = {"loss": loss, **upload.scalars}
        # All clients' lies alike, in the same order: a record knows tensors by their places.
        kept = unstack(map_tensors(in_order(keep), Tensor.contiguous), len(loss))
        return Part(update, counters, sums, kept, scalars, combined, lent=False, group=group)

    def memory(self, params: Tree, buffers: Tree, told: Memory) -> Memory:
        """What a client never seen remembers, for everything that clients remember."""
        algorithm = self.algorithm
        memory = {name: first(params, told) for name, first in algorithm.memory.items()}
        if not algorithm.reset:
            memory |= {f"solver.{name}": t for name, t in algorithm.solve.init(params).items()}
        if algorithm.personal_norm:
            model = params | buffers
            memory["norm"] = {name: model[name] for name in self.layout.norm_names}
        ordered: Memory = in_order(memory)
        return ordered


def lasting(parts: list[Part], recorded: bool = False) -> list[Part]:
    """Parts that outlive the tensors they were made in: those of a record, or of all clients."""
    own: list[dict[str, Any]] = []
    for part in parts:
        own.append({"keep": part.keep} if any(part.keep) else {})
        if recorded:
            own[-1]["scalars"] = dict(part.scalars)
        if recorded and not part.combined:  # else it is added up at once
            own[-1]["update"] = part.update
    return [
        part._replace(**made, lent=recorded) for part, made in zip(parts, copies(own), strict=True)
    ]


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
    return replace(first, **{name: join([getattr(part, name) for part in parts]) for name in names})


Cuts = tuple[tuple[int, ...], tuple[int, ...]]
"""For each step, how many clients still train, and how many examples their batches hold."""


def cuts(plan: Plan) -> Cuts:
    """They hold for clients sorted by their steps, as `Given` has them."""
    lives = (plan.counts > 0).sum(0)
    num_steps = int((lives > 0).sum())
    widths = plan.counts.amax(0) if len(plan.counts) else lives
    return tuple(lives[:num_steps].tolist()), tuple(widths[:num_steps].tolist())


def _in_place(step: Step, local: Local, now: Inputs) -> tuple[Local, Tensor]:
    """A step that leaves its result where it found what it started from."""
    moved, loss = step(replace(local), now)
    with torch.no_grad():
        for part in ("params", "buffers", "solver"):
            copy_tensors(getattr(moved, part), getattr(local, part))
    return local, loss
