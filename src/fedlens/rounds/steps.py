"""Local training step by step: the inputs of a step, and functions on clients between steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import groupby
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fedlens.algorithm import Algorithm
from fedlens.algorithm.slots import LocalStep
from fedlens.core import Batch, Cuts, FactoredWeights, Local, Tree
from fedlens.core.federation import Examples
from fedlens.core.trees import join, map_tensors
from fedlens.data.augment import Augment
from fedlens.data.augment.mixup import Mixture
from fedlens.rounds.work import ClientInputs

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

    def at(self, which: slice) -> StepInput:
        return StepInput._make([*(t[:, which] for t in self[:-1]), self.step[which]])

    def by_step(self) -> StepInput:
        """The same as [S, C, ...], for all steps at once: a kernel for each step costs more."""
        ordered = (t.transpose(0, 1).contiguous() for t in self[:-1])
        return StepInput._make([*ordered, self.step])


def each_step(
    examples: Examples,
    now: StepInput,
    prepare: Callable[[Tensor], Tensor] | None = None,
    at_once: int | None = None,
) -> Iterator[tuple[StepInput, Tensor]]:
    """Yield each step and its images [C, B, ...], read and prepared for several steps at once."""
    ordered = now.by_step()
    steps = map(StepInput._make, zip(*(t.unbind() for t in ordered), strict=True))
    at_once = at_once or _steps_at_once(examples, ordered.chosen[0].numel())
    for first in range(0, len(ordered.chosen), at_once):
        some = ordered.chosen[first : first + at_once]
        images = examples.read(some.flatten())
        images = images.view(*some.shape, *images.shape[1:])
        for shown in (images if prepare is None else prepare(images)).unbind():
            yield next(steps), shown


def _steps_at_once(examples: Examples, num_images: int) -> int:
    """How many steps, each of this many images, are read at once."""
    if not examples.images.is_cuda:
        return 1
    return max(READ_AHEAD // (num_images * examples.images.shape[1:].numel()), 1)


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


TakeSteps = Callable[[Algorithm, Local, StepInput], tuple[Local, Tensor]]
"""Takes S steps of every client, by an algorithm with their own numbers; the losses are [C, S]."""


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


def drift_of(algorithm: Algorithm, local: Local) -> Tree:
    """What every step of the round adds to the gradient, if anything."""
    assert algorithm.local_step is not None
    drift = algorithm.local_step.drift
    if drift is None:
        return {}
    # In the memory layout of the parameters, which an engine may choose.
    return {name: torch.empty_like(p).copy_(drift(local, name)) for name, p in local.params.items()}


def numbers_of_clients(inputs: ClientInputs, params: Tree) -> tuple[Tensor, ...]:
    """The numbers of the local steps, if they are an input: each [] or, by client, [C]."""
    if inputs.numbers is None:
        return ()
    numbers = inputs.numbers.to(next(iter(params.values())).dtype)
    if inputs.group is None or len(inputs.cohort_sizes) == 1:
        return tuple(number[0] for number in numbers)
    return tuple(number[inputs.group] for number in numbers)


def rows_of(local: Local, which: slice) -> Local:
    """Copies of some clients of `local`; shared tensors, with a leading axis of 1, stay."""
    return _of_clients(local, lambda t: t[which].clone())


def views_of(local: Local, which: slice) -> Local:
    """The same as views."""
    return _of_clients(local, lambda t: t.detach()[which])


def _of_clients(local: Local, fn: Callable[[Tensor], Tensor]) -> Local:
    clients = len(local.steps)
    local = replace(local, step=None, count=None, loss=None)
    some: Local = map_tensors(local, lambda t: fn(t) if t.ndim and len(t) == clients else t)
    return some


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
