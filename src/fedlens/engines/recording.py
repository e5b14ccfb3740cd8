"""How an engine runs the client program: plainly, or recorded and replayed.

Small clients are many small kernels on a GPU, and without recording the time goes into launching
them. What comes in one shape again and again is recorded: a whole round once its shape has come
often enough, and before that a step, whose shape comes sooner. To record takes as long as to run
once without: a round of more than LONG steps is recorded in blocks of BLOCK steps instead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from fedlens.algorithm import Algorithm
from fedlens.client import ClientProgram
from fedlens.core import Cuts, Local
from fedlens.federation import Examples
from fedlens.network.model import Model
from fedlens.network.ops import compile_ahead
from fedlens.steps import StepInput, TakeSteps
from fedlens.trees import copies, copy_tensors, tensors_in
from fedlens.work import ClientInputs, PackedInputs, Part, Shared, Work

T = TypeVar("T")

LONG = 128  # steps of a round that is recorded as a whole, at the most
BLOCK = 32  # steps recorded together of one that is longer


class Recorder(Protocol):
    """How an engine makes fast what comes again and again in the same shape.

    It gives what `function` gives for these tensors, or None if it was not seen often enough. The
    result may be overwritten by the next call with the same key; `function` reads no tensor that
    is not given to it, but those that stay in their place for as long as the key is used.
    """

    def __call__(self, key: object, function: Callable[..., T], *inputs: Any) -> T | None: ...

    def place(self, value: T) -> T:
        """`value` in memory that stays, always the same: it is over when this is called again.

        What is recorded of tensors there is not copied before it is replayed, nor what it gives.
        """
        ...


def run_program(
    program: ClientProgram,
    model: Model,
    examples: Examples,
    shared: Shared,
    work: Work,
    recorder: Recorder | None = None,
    take_steps: TakeSteps | None = None,
) -> list[Part]:
    """What some clients send: a part for each experiment that there are clients of.

    `take_steps` is used where nothing is recorded, see `ClientProgram.run`.
    """
    device, spans = examples.labels.device, work.spans
    if recorder is None and device.type == "cpu":
        inputs = ClientInputs.of(work)
        return _own_memory(
            program.run(model, examples, work.plan.cuts, spans, shared, inputs, take_steps),
            recorded=False,
        )
    numbers = None if recorder is None else program.numbers
    packed, unpack, shapes = PackedInputs.of(ClientInputs.of(work, numbers), device)
    shape = work.plan.cuts

    def whole_round(shared: Shared, packed: PackedInputs) -> list[Part]:
        return program.run(model, examples, shape, spans, shared, unpack(packed))

    if recorder is None:
        return _own_memory(whole_round(shared, packed), recorded=False)
    key = "round", shape, spans, shapes, work.cohort_sizes
    num_steps = len(shape[0])
    parts = recorder(key, whole_round, shared, packed) if num_steps <= LONG else None
    if parts is not None:
        return _own_memory(parts, recorded=True)
    take_steps = RecordedSteps(recorder, StepsInPlace(program, model, examples))
    widest = _widest(work)
    parts = program.run(model, examples, widest, spans, shared, unpack(packed), take_steps)
    return _own_memory(parts, recorded=True)


def warm_up(
    program: ClientProgram, model: Model, examples: Examples, shared: Shared, work: Work
) -> None:
    """Have the kernels of a first round compiled, which would wait for each other in it."""
    packed, unpack, _ = PackedInputs.of(
        ClientInputs.of(work, program.numbers), examples.labels.device
    )
    training, widths = _widest(work)
    one_step = training[:1], widths[:1]
    compile_ahead(
        lambda: program.run(model, examples, one_step, work.spans, shared, unpack(packed))
    )


def _widest(work: Work) -> Cuts:
    """The cuts of its plan with the widest batch at every step, so that all have one shape."""
    training, _ = work.plan.cuts
    return training, (work.plan.index.shape[2],) * len(training)


@dataclass(frozen=True)
class StepsInPlace:
    """Steps that leave their result where they found what they started from; gives their losses.

    What is recorded keeps this, so it knows no recorder: each would keep the other in memory.
    """

    program: ClientProgram
    model: Model
    examples: Examples

    def __call__(self, local: Local, now: StepInput) -> Tensor:
        algorithm = self.program.algorithm_of(local)
        moved, losses = self.program.take_steps(
            self.model, self.examples, algorithm, replace(local), now
        )
        with torch.no_grad():
            for part in ("params", "buffers", "solver"):
                copy_tensors(getattr(moved, part), getattr(local, part))
        return losses


@dataclass
class RecordedSteps:
    """`ClientProgram.take_steps` for one round, recorded: BLOCK by BLOCK, what is left one by one.

    All steps leave clients where they found them, in the recorder's place, also when some are done
    and the others go on: to copy them all each time would take longer than the steps.
    """

    recorder: Recorder
    in_place: StepsInPlace
    has_begun: bool = False

    def __call__(self, _: Algorithm, local: Local, now: StepInput) -> tuple[Local, Tensor]:
        local = replace(local, step=None, count=None, loss=None)
        if not self.has_begun:
            local, self.has_begun = self.recorder.place(local), True
        total = len(now.step)
        in_blocks = total // BLOCK * BLOCK if total > LONG else 0
        firsts = [*range(0, in_blocks, BLOCK), *range(in_blocks, total)]
        losses = []
        key = "steps", tuple(t.stride() for t in tensors_in(local))  # it reads them where they lie
        for first, end in pairwise([*firsts, total]):
            some = now.at(slice(first, end))
            loss = self.recorder(key, self.in_place, local, some)
            # The next steps write over what was recorded.
            losses.append(self.in_place(local, some) if loss is None else loss.clone())
        return local, torch.cat(losses, 1)


def _own_memory(parts: list[Part], recorded: bool) -> list[Part]:
    """Parts that outlive the tensors they were made in: a recorder's, or those of all clients."""
    own: list[dict[str, Any]] = []
    for part in parts:
        own.append({"keep": part.keep} if any(part.keep) else {})
        if recorded:
            own[-1]["scalars"] = dict(part.scalars)
            own[-1]["channel_scalars"] = dict(part.channel_scalars)
        if recorded and not part.combined:  # else it is added up at once
            own[-1]["update"] = part.update
    return [
        part._replace(**made, borrowed=recorded)
        for part, made in zip(parts, copies(own), strict=True)
    ]
