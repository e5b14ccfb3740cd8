"""What clients do in a round, step by step. Local training is implemented only here.

This is straight-line tensor code over C clients side by side; C is 1 if an engine trains clients
one after another. It has no branch on a tensor's value and no `.item()`: the plan gives the number
of steps of each client and the number of examples in each batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from fedlens.algorithm import Algorithm, numbers_of, pick, same, side_by_side, with_numbers
from fedlens.algorithm.channel import encode, first_memory, told_of
from fedlens.algorithm.pieces import Objective
from fedlens.algorithm.secure import SecureSum
from fedlens.algorithm.slots import OWN, LocalStep
from fedlens.config.names import refuse_taken
from fedlens.core import Batch, Cuts, FactoredWeights, Local, Memory, Tree, Upload, keys, tree_map
from fedlens.core.federation import Examples
from fedlens.core.trees import copy_tensors, in_order, join, map_tensors, stack, unstack
from fedlens.data.augment import Augment
from fedlens.data.augment.changes import Mixture
from fedlens.network.functional import Model
from fedlens.network.layout import Layout
from fedlens.network.ops import local_step_, weighted_mean
from fedlens.network.private import AnyModel, PrivateModel
from fedlens.rounds.uploads import MEASURED, NORM, PEAK, norm_of
from fedlens.rounds.work import ClientInputs, Part, Shared, Span, Spans

READ_AHEAD = 2**25  # pixel values that a GPU reads at once; a CPU reads one step at a time


class StepInput(NamedTuple):
    """The inputs of S steps of C clients, from their plan; for a single step, without the S."""

    chosen: Tensor  # [C, S, B] positions in Examples
    labels: Tensor  # [C, S, B]
    mask: Tensor  # [C, S, B]
    counts: Tensor  # [C, S]
    dropout_keys: Tensor  # [C, S]
    augment_keys: Tensor  # [C, S]
    ones: Tensor  # [C, S] the gradient of the sum of all clients' losses with respect to each
    step: Tensor  # [S]

    def at(self, steps: slice, training: int | None = None, width: int | None = None) -> StepInput:
        """Some steps, of the first clients, which still train, and of the first examples."""
        rows = slice(training), steps
        parts = (t[rows] if t.ndim < 3 else t[rows][..., :width] for t in self[:-1])
        return StepInput._make([*parts, self.step[steps]])


def each_step(
    examples: Examples,
    now: StepInput,
    prepare: Callable[[Tensor], Tensor] | None = None,
    at_once: int | None = None,
) -> Iterator[tuple[StepInput, Tensor]]:
    """Yield each step and its images [C, B, ...], read and prepared for several steps at once."""
    # As [S, C, ...], for all steps at once: a kernel for each step costs more.
    chosen, *rest = (t.transpose(0, 1).contiguous() for t in now[:-1])
    ordered = (t.unbind() for t in (chosen, *rest, now.step))
    steps = map(StepInput._make, zip(*ordered, strict=True))
    if at_once is None:
        size = chosen[0].numel() * examples.images.shape[1:].numel()  # pixel values of a step
        at_once = max(READ_AHEAD // size, 1) if examples.images.is_cuda else 1
    for first in range(0, len(chosen), at_once):
        some = chosen[first : first + at_once]
        images = examples.read(some.flatten())
        images = images.view(*some.shape, *images.shape[1:])
        for shown in (images if prepare is None else prepare(images)).unbind():
            yield next(steps), shown


def as_batch(
    images: Tensor, now: StepInput, augment: Augment | None
) -> tuple[Batch, Mixture | None]:
    """The examples of one step as the model sees them, and how they are mixed, if they are."""
    mixture = None
    if augment is not None:
        images = augment(images, now.augment_keys)
        mixture = augment.mixture(now.augment_keys, now.counts, now.chosen.shape[1])
    if mixture is not None:
        images = mixture.of_images(images)
    return Batch(images, now.labels, now.mask), mixture


TakeSteps = Callable[[Local, StepInput], tuple[Local, Tensor]]
"""Takes S steps of every client; the losses are [C, S]."""


class WeightForm(Protocol):
    """Another form than tensors for some weights of clients: see engines/factored.py."""

    @property
    def sums_uploads(self) -> bool:
        """Whether only the sum of the clients' updates of these weights is computed."""
        ...

    def start(self, local: Local, inputs: ClientInputs, step: LocalStep) -> FactoredWeights:
        """What clients have in place of these weights before their first step."""
        ...

    def weights(self, local: Local, step: Tensor) -> dict[str, Any]:
        """What the model uses in place of these weights in this step, counted from 0, []."""
        ...

    def multiplied_out(self, local: Local, step: LocalStep) -> Local:
        """Clients with these weights as tensors, after their last step."""
        ...


def equal_steps(cuts: Cuts) -> Iterator[tuple[slice, int, int]]:
    """Runs of steps with equal numbers of clients and examples, and these two numbers."""
    first = 0
    for (training, width), some in groupby(zip(*cuts, strict=True)):
        steps = slice(first, first + len(list(some)))
        yield steps, training, width
        first = steps.stop


class _OneForAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, losses: Tensor, ones: Tensor) -> Tensor:
        ctx.ones = ones.to(losses)
        return losses.detach()[0]

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, None]:
        return ctx.ones, None


def one_for_all(losses: Tensor, ones: Tensor) -> Tensor:  # [C] each
    """A scalar whose gradients are those of the sum of all losses; its value is not used.

    `torch.autograd.grad` accepts a scalar as it is. To check gradients that it is given, such as
    `ones` for `losses`, it imports SymPy, which takes longer than many runs.
    """
    if len(losses) == 1:
        return losses
    apply: Any = _OneForAll.apply
    one: Tensor = apply(losses, ones)
    return one


def rows_of(local: Local, which: slice, *, views: bool) -> Local:
    """Some clients of `local`, as copies or views; tensors with a leading axis of 1 are shared."""
    clients = len(local.steps)

    def own(t: Tensor) -> Tensor:
        if not t.ndim or len(t) != clients:
            return t
        return t.detach()[which] if views else t[which].clone()

    some: Local = map_tensors(replace(local, step=None, count=None, loss=None), own)
    return some


def laid_out(memory: Memory, params: Tree) -> Memory:
    """Trees in the memory layout of the parameters, which an engine may choose.

    On a GPU, steps on tensors of different layouts take several times as long.
    """

    def like(name: str, t: Tensor) -> Tensor:
        p = params.get(name, t)
        if p.shape != t.shape or p.stride() == t.stride():
            return t
        return torch.empty_like(p, dtype=t.dtype).copy_(t)

    return {part: {n: like(n, t) for n, t in tree.items()} for part, tree in memory.items()}


def own_rows(rows: slice, tensor: Tensor) -> Tensor:
    return tensor[rows] if tensor.ndim else tensor


def concatenated(parts: list[Local]) -> Local:
    first = parts[0]
    names = ["params", "buffers", "facts", "memory", "solver", "steps", "factored"]
    names += ["clients", "client_keys"]
    if first.group is not None:
        names += ["anchor", "told", "group"]
        names += ["numbers"] if first.numbers and first.numbers[0].ndim else []
    return replace(first, **{name: join([getattr(part, name) for part in parts]) for name in names})


AUGMENT = keys.purpose("augment")

_A_NUMBER = torch.tensor(1.0)  # stands for every nonzero number in `ClientProgram._structure`


def _gradients(loss: Tensor, ones: Tensor, local: Local, *, zeros: bool = True) -> Tree:
    """The gradients of a loss [C]; zeros, or none, by parameters that play no role in it."""
    params = list(local.params.values())
    found = torch.autograd.grad(
        one_for_all(loss, ones), params, allow_unused=True, materialize_grads=zeros
    )
    return {name: g for name, g in zip(local.params, found, strict=True) if g is not None}


def _gradients_at(
    losses: Callable[[Objective, Tree, Tree], tuple[tuple[Tensor, Tensor], Tree]],
    objective: Objective,
    local: Local,
    ones: Tensor,
    model: Tree,
) -> Tree:
    """See `Local.gradients`."""
    params, buffers = (
        {name: model.get(name, t).detach() for name, t in tree.items()}
        for tree in (local.params, local.buffers)
    )
    with torch.enable_grad():
        for p in params.values():
            p.requires_grad_()
        (loss, _), moved = losses(replace(objective, penalties=()), params, buffers)
        found = _gradients(loss, ones, replace(local, params=params))
    copy_tensors(moved, buffers)
    return found


def _features_of(model: Model, local: Local, keys: Tensor, other: Tree) -> Tensor:
    """See `Local.features_of`."""
    assert local.batch is not None
    params = {name: other.get(name, p).detach() for name, p in local.params.items()}
    params = {name: p.expand(len(keys), *p.shape[1:]) for name, p in params.items()}
    buffers = {name: b.clone() for name, b in local.buffers.items()}
    with torch.enable_grad():  # without, layers may flatten in another order; nothing needs any
        _, seen, _ = model.features(params, buffers, local.batch.images, keys, local.batch.mask)
    return seen


def _private_gradients(
    model: PrivateModel, objective: Objective, batch: Batch, local: Local, now: StepInput
) -> tuple[Tree, Tensor]:
    """Clipped and noisy gradients, and the mean loss [C]."""
    private = objective.private
    assert private is not None
    logits, notes = model(local.params, batch.images, now.dropout_keys, batch.mask)
    losses = objective.loss(logits.to(batch.mask), batch.labels)
    plain_loss = weighted_mean(losses.detach(), batch.mask)
    grads = private(notes.clipped_sums(losses, batch.mask, private.clip), local)
    if objective.penalties:
        pulls = _gradients(
            objective.penalised(torch.zeros_like(plain_loss), local), now.ones, local
        )
        grads = {name: g + pulls[name] for name, g in grads.items()}
    return grads, plain_loss


@dataclass(frozen=True)
class ClientProgram:
    """Local training, uploads and, if `combine` is linear or all clients are here, combination.

    In a sweep, `algorithm` has numbers [G], and `each` lists the algorithms of the experiments.
    """

    algorithm: Algorithm
    layout: Layout
    augment: Augment | None = None
    each: tuple[Algorithm, ...] = ()
    form: WeightForm | None = None
    measures_norm: bool = False  # of all that a client sends
    uncombined: bool = False  # whether uploads stay so: which others report is not known yet

    @classmethod
    def joint(cls, programs: Sequence[ClientProgram], like: Tensor) -> ClientProgram:
        """One program for the clients of several experiments that differ only in numbers.

        Only the local steps are computed side by side; for the rest each experiment uses its own
        algorithm. `like` has the dtype and the device of the parameters.
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

    @property
    def is_private(self) -> bool:
        """Whether gradients are clipped example by example."""
        return self.algorithm.objective.private is not None

    @property
    def algorithms(self) -> tuple[Algorithm, ...]:
        """The algorithm of each experiment."""
        return self.each or (self.algorithm,)

    @cached_property
    def own_names(self) -> tuple[str, ...]:
        """The tensors of the model that are each client's own."""
        personal = self.algorithm.personal
        return () if personal is None else tuple(personal.names(self.layout))

    def leaving(self, model: Tree) -> Tree:
        """Those tensors of a model, or of an update, that clients send."""
        personal = self.algorithm.personal
        if personal is None or personal.averaged or personal.beside:
            return model
        return {name: t for name, t in model.items() if name not in self.own_names}

    @cached_property
    def numbers(self) -> list[list[float]]:  # P of G
        """The numbers of each experiment's local steps, which a recorded round takes as input."""
        return numbers_of([(one.objective, one.solve) for one in self.algorithms])

    def differs_in_numbers_alone(self, other: ClientProgram) -> bool:
        """Whether the clients' part of both programs differs in nothing but `numbers`."""
        return same(self._structure, other._structure)

    def with_numbers(self, numbers: Sequence[float]) -> ClientProgram:
        """This program with the `numbers` of another one that differs only in these."""
        rules = self.algorithm.objective, self.algorithm.solve
        objective, solve = with_numbers(rules, iter(numbers))
        return replace(self, algorithm=replace(self.algorithm, objective=objective, solve=solve))

    @cached_property
    def _structure(self) -> tuple[Any, ...]:
        found: list[Any] = [
            self.layout,
            self.augment,
            self.form,
            self.measures_norm,
            self.uncombined,
        ]
        for one in self.algorithms:
            rules = with_numbers((one.objective, one.solve), itertools.repeat(_A_NUMBER))
            found += [rules, one.upload, one.channel, one.combine, one.carries, one.memory]
            found += [one.personal, one.discloses]
        return tuple(found)

    def run(
        self,
        model: AnyModel,
        examples: Examples,
        cuts: Cuts,
        spans: Spans,
        shared: Shared,
        inputs: ClientInputs,
        take_steps: TakeSteps | None = None,
    ) -> list[Part]:
        """Run all steps of all clients, and return what they send: a part for each experiment.

        `take_steps` is an engine's own implementation, which keeps clients' tensors in place.
        """
        some_of = partial(rows_of, views=take_steps is not None)
        take_steps = take_steps or partial(self.take_steps, model, examples)
        local, loss = self._train(examples.labels, cuts, take_steps, some_of, shared, inputs)
        if inputs.to_cohort is not None:
            order = inputs.to_cohort
            local, loss = map_tensors(
                (local, loss), lambda t: t[order] if t.ndim and len(t) > 1 else t
            )
        with torch.no_grad():
            uploads = self._uploads(spans, local, shared.exact)
            return [
                self._send(span, upload, local, loss, inputs)
                for span, upload in zip(spans, uploads, strict=True)
            ]

    def _train(
        self,
        known_labels: Tensor,
        cuts: Cuts,
        take_steps: TakeSteps,
        some_of: Callable[[Local, slice], Local],
        shared: Shared,
        inputs: ClientInputs,
    ) -> tuple[Local, Tensor]:
        """The clients after their steps, and their mean loss [C]."""
        local = self._start(shared, inputs)
        algorithm = self.algorithm_of(local)
        step = algorithm.local_step
        drift = step.drift if step is not None and step.contracts else algorithm.solve.drift
        if drift is not None:
            local.drift = {
                name: torch.empty_like(p).copy_(drift(local, name))
                for name, p in local.params.items()
            }
        dtype, device = next(iter(local.params.values())).dtype, known_labels.device
        index, counts = inputs.plan.index, inputs.plan.counts
        labels = known_labels[index]
        mask = (torch.arange(index.shape[2], device=device) < counts[:, :, None]).to(dtype)
        steps = torch.arange(index.shape[1], device=device)
        augment_keys = inputs.dropout_keys
        if self.augment is not None:
            augment_keys = keys.fold(inputs.keys[:, None], AUGMENT, steps)
        ones = torch.ones(index.shape[:2], dtype=dtype, device=device)
        every = StepInput(
            index, labels, mask, counts, inputs.dropout_keys, augment_keys, ones, steps
        )
        losses: list[Tensor] = []
        finished: list[Local] = []

        for some, training, width in equal_steps(cuts):
            if training < len(local.steps):
                finished.append(some_of(local, slice(training, None)))
                local = some_of(local, slice(training))
            local, loss = take_steps(local, every.at(some, training, width))
            missing = len(index) - training
            losses.append(F.pad(loss, (0, 0, 0, missing)) if missing else loss)

        whole = concatenated([local, *reversed(finished)]) if finished else local
        params = {name: p.detach() for name, p in whole.params.items()}
        # Not in place: a recorder may own `whole`.
        whole = replace(whole, params=params, step=None, count=None, loss=None, drift={})
        total = counts.new_zeros(len(index), dtype=dtype)
        if losses:
            total = (torch.cat(losses, 1) * counts[:, : len(cuts[0])]).sum(1)
        return whole, total / counts.sum(1).clamp(min=1)

    def algorithm_of(self, local: Local) -> Algorithm:
        """The algorithm with, for each of these clients, the numbers of its experiment."""
        if not local.numbers:
            return pick(self.algorithm, local.group if self.each else None)
        rules = self.algorithm.objective, self.algorithm.solve
        objective, solve = with_numbers(rules, iter(local.numbers))
        return replace(self.algorithm, objective=objective, solve=solve)

    def take_steps(
        self,
        model: AnyModel,
        examples: Examples,
        local: Local,
        now: StepInput,
        on_step: Callable[[], None] = lambda: None,
    ) -> tuple[Local, Tensor]:
        """Take S steps with equal numbers of clients and examples; the losses are [C, S]."""
        losses, algorithm = [], self.algorithm_of(local)
        prepare = model.normalise if self.augment is None else None
        for one, images in each_step(examples, now, prepare):
            local, loss = self._take_step(model, images, algorithm, local, one)
            losses.append(loss)
            on_step()
        return local, torch.stack(losses, 1)

    def _take_step(
        self, model: AnyModel, images: Tensor, algorithm: Algorithm, local: Local, now: StepInput
    ) -> tuple[Local, Tensor]:
        """Take one step of every client; the loss is [C]."""
        batch, mixture = as_batch(images, now, self.augment)
        for p in local.params.values():
            p.requires_grad_()
        objective, step = algorithm.objective, algorithm.local_step
        contracts = step is not None and step.contracts and not step.is_plain
        if contracts:  # `local_step_` applies the penalties
            objective = replace(objective, penalties=())
        local.step, local.count = now.step, now.counts
        if isinstance(model, PrivateModel):
            grads, plain_loss = _private_gradients(model, objective, batch, local, now)
        else:
            weights: dict[str, Any] = local.params
            if self.form is not None:
                weights = weights | self.form.weights(local, now.step)

            def losses(
                of: Objective, weights: dict[str, Any], buffers: Tree
            ) -> tuple[tuple[Tensor, Tensor], Tree]:
                given = batch.images, now.dropout_keys, batch.mask
                if any(penalty.reads_features for penalty in of.penalties):
                    logits, local.features, buffers = model.features(weights, buffers, *given)
                else:
                    logits, buffers = model(weights, buffers, *given)
                shown = batch
                if mixture is not None:
                    logits, shown = mixture.two_labels(logits, batch)
                return of(logits, shown, local), buffers

            local.batch = batch
            local.features_of = partial(_features_of, model, local, now.dropout_keys)
            (loss, plain_loss), local.buffers = losses(objective, weights, local.buffers)
            local.loss = plain_loss
            local.gradients = partial(_gradients_at, losses, objective, local, now.ones)
            # Layers that take their step in the backward pass return no gradients.
            grads = _gradients(loss, now.ones, local, zeros=not model.takes_steps)
        params = {name: local.params[name] for name in grads}
        if params:
            with torch.no_grad():
                if contracts:
                    assert step is not None
                    local_step_(params, grads, local.anchor, local.drift, step.lr, step.decay)
                else:
                    params, local.solver = algorithm.solve.update(
                        grads, local.solver, params, local
                    )
            local.params = {name: params.get(name, p) for name, p in local.params.items()}
        local.gradients = local.features_of = None  # they refer to `local`
        local.batch = local.features = None
        return local, plain_loss

    def _start(self, shared: Shared, inputs: ClientInputs) -> Local:
        """The clients before their first step: the server's model, and what each remembers."""
        clients, anchor, group = len(inputs.keys), shared.params, inputs.group
        told = laid_out(shared.told, anchor)
        if group is None:
            params, buffers = (
                {name: t.expand(clients, *t.shape[1:]).clone() for name, t in tree.items()}
                for tree in (shared.params, shared.buffers)
            )
        else:
            anchor, told, params, buffers = map_tensors(
                (shared.params, told, shared.params, shared.buffers), lambda t: t[group]
            )
        memory = laid_out(stack(inputs.memory), params)
        personal = self.algorithm.personal
        own = {} if personal is None else personal.start(params | buffers, memory)
        beside = personal is not None and personal.beside
        for name, t in ({} if beside else own).items():
            (params if name in params else buffers)[name] = t
        numbers: tuple[Tensor, ...] = ()  # [] or [C] each, if those of local steps are an input
        if inputs.numbers is not None:
            one = group is None or len(inputs.cohort_sizes) == 1
            found = inputs.numbers.to(next(iter(params.values())).dtype)
            numbers = tuple(number[0 if one else group] for number in found)
        local = Local(
            params=params,
            buffers=buffers,
            anchor=anchor,
            exact={},
            told=told,
            facts=inputs.facts,
            memory=memory,
            solver={},
            steps=inputs.steps,
            group=group,
            numbers=numbers,
            clients=inputs.clients,
            client_keys=inputs.keys,
            own=self.own_names,
        )
        algorithm = self.algorithm_of(local)
        if self.form is not None and algorithm.local_step is not None:
            local.factored = self.form.start(local, inputs, algorithm.local_step)
        local.solver = algorithm.solve.init(params)
        for name in self.algorithm.carries & local.solver.keys():
            local.solver[name] = tree_map(torch.clone, memory[f"solver.{name}"])
        if beside:
            local.solver[OWN] = own
        return local

    def _uploads(self, spans: Spans, local: Local, exact: Tree) -> list[Upload]:
        """What clients send, experiment by experiment."""
        group = local.group
        if group is None:
            return [self._upload(0, replace(local, exact=exact))]
        small = self.form is not None and self.form.sums_uploads
        if small or not self.each:  # or groups are versions of one experiment's model
            own = {name: t[group] for name, t in exact.items()}
            whole = self._upload(0, replace(local, exact=own))
            return [map_tensors(whole, itemgetter(slice(first, end))) for _, first, end in spans]
        found = []
        for number, first, end in spans:
            mine: Local = map_tensors(local, partial(own_rows, slice(first, end)))
            mine.exact = {name: t[number : number + 1] for name, t in exact.items()}
            found.append(self._upload(number, mine))
        return found

    def _upload(self, number: int, local: Local) -> Upload:
        """What the clients of one experiment send."""
        own = self.algorithms[number]
        algorithm = self.algorithm_of(local) if local.numbers else own
        local = replace(local, lr=algorithm.solve.learning_rate)
        if (
            self.form is not None
            and not self.form.sums_uploads
            and algorithm.local_step is not None
        ):
            local = self.form.multiplied_out(local, algorithm.local_step)
        return own.upload(local)

    def _send(
        self, span: Span, upload: Upload, local: Local, loss: Tensor, inputs: ClientInputs
    ) -> Part:
        """What comes back from the clients of one experiment."""
        number, rows = span[0], slice(*span[1:])
        algorithm = self.algorithms[number]
        shares, cohort = inputs.shares[rows], inputs.cohort_of(rows)
        if "label_counts" not in algorithm.discloses:
            cohort = cohort._replace(label_shares=None)
        model, solver, loss, client_keys = map_tensors(
            (local.params | local.buffers, local.solver, loss, local.client_keys), itemgetter(rows)
        )
        sent, keep = self.leaving(upload.update), dict(upload.keep)
        algorithm.check_kept(keep)
        memory: Memory = {}
        if any(step.remembers for step in algorithm.channel):
            memory = map_tensors(local.memory, itemgetter(rows))
        told = told_of(algorithm.channel, local.told)
        memory |= told if local.group is None else map_tensors(told, itemgetter(rows))
        sent, channel_scalars, channel_keep, notes = encode(
            algorithm.channel, sent, memory, client_keys, self.layout
        )
        for name in upload.tracks if algorithm.channel else ():
            keep[name] = {
                key: t + (sent[key] - upload.update[key]).to(t) for key, t in keep[name].items()
            }
        keep |= channel_keep
        keep |= {f"solver.{name}": solver[name] for name in algorithm.carries & solver.keys()}
        if self.own_names:
            own = solver.get(OWN, model)
            keep[OWN] = {name: own[name] for name in self.own_names}
        refuse_taken([*upload.scalars, *channel_scalars])
        scalars = {"loss": loss, **upload.scalars}
        if self.measures_norm:
            scalars[NORM] = norm_of([sent, *upload.extra.values()], loss)
        whole = len(loss) == inputs.cohort_sizes[number]
        elsewhere = self.uncombined or algorithm.combine.at_server
        combined = not elsewhere and (algorithm.sums_parts or whole)
        sums = {n: {k: t.sum(0) for k, t in tree.items()} for n, tree in upload.extra.items()}
        if combined and isinstance(secure := algorithm.combine, SecureSum):
            private = algorithm.covered  # then nothing is sent that has no noise, and no loss
            measured = {} if private else {n: t for n, t in scalars.items() if n != NORM}
            scalars[PEAK] = secure.peak([sent, *upload.extra.values(), measured, channel_scalars])
            alike = torch.full_like(shares, 1 / inputs.cohort_sizes[number])
            sums = {n: secure.whole(tree, alike) for n, tree in upload.extra.items()}
            sums[MEASURED] = secure.whole(measured, cohort.size_shares)
            sums[MEASURED] |= secure.whole(channel_scalars, alike)
        if combined:
            sent = algorithm.combine(sent, shares, cohort, self.layout)
        counters = {name: t.amax(0) for name, t in model.items() if not t.is_floating_point()}
        # The same layout and order for all clients: a recorder identifies tensors by position.
        kept = unstack(map_tensors(in_order(keep), Tensor.contiguous), len(loss))
        return Part(
            update=sent,
            counters=counters,
            extra=sums,
            keep=kept,
            scalars=scalars,
            combined=combined,
            borrowed=False,
            group=number,
            channel_scalars=channel_scalars,
            notes=notes if self.uncombined else {},
        )

    def sends_besides(self, shared: Shared, inputs: ClientInputs) -> Memory:
        """What one client that takes no steps sends besides its update."""
        with torch.no_grad():
            (upload,) = self._uploads(((0, 0, 1),), self._start(shared, inputs), shared.exact)
        return {name: map_tensors(tree, itemgetter(0)) for name, tree in upload.extra.items()}

    def memory(self, params: Tree, buffers: Tree, told: Memory) -> Memory:
        """The initial memory of a client that was never selected."""
        algorithm = self.algorithm
        memory = {name: first(params, told) for name, first in algorithm.memory.items()}
        memory |= first_memory(algorithm.channel, params)
        if not algorithm.reset:
            (solver,) = unstack(algorithm.solve.init({n: p[None] for n, p in params.items()}), 1)
            memory |= {f"solver.{name}": solver[name] for name in algorithm.carries & solver.keys()}
        if self.own_names:
            model = params | buffers
            memory[OWN] = {name: model[name] for name in self.own_names}
        ordered: Memory = in_order(memory)
        return ordered
