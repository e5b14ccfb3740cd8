"""How an engine runs the client program: directly, or recorded and replayed.

Small clients launch many small kernels on a GPU, and without recording most time goes into the
launches. Calls that recur with one shape are recorded: a whole round once its shape has occurred
often enough, and before that single steps, whose shapes recur sooner. Recording takes as long as
one run without it, so a round of more than LONG steps is recorded in blocks of BLOCK steps instead.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor

from fedlens.core import Cuts, Local
from fedlens.core.federation import Examples
from fedlens.core.trees import copies, copy_tensors, tensors_in
from fedlens.network.ops import compile_ahead
from fedlens.network.private import AnyModel
from fedlens.rounds.client import ClientProgram, StepInput, TakeSteps
from fedlens.rounds.engine import Recorder
from fedlens.rounds.work import ClientInputs, PackedInputs, Part, Shared, Work

T = TypeVar("T")

LONG = 128  # the most steps of a round that is recorded as a whole
BLOCK = 32  # steps that are recorded together in a longer round


def run_program(
    program: ClientProgram,
    model: AnyModel,
    examples: Examples,
    shared: Shared,
    work: Work,
    recorder: Recorder | None = None,
    take_steps: TakeSteps | None = None,
) -> list[Part]:
    """Train some clients; return what they send, one part for each experiment among them.

    `take_steps` is used where nothing is recorded: see `ClientProgram.run`.
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
    # Poisson batches have widths that never recur.
    shape = work.plan.cuts if work.plan.taken is None else _widest(work)

    def whole_round(shared: Shared, packed: PackedInputs) -> list[Part]:
        return program.run(model, examples, shape, spans, shared, unpack(packed))

    if recorder is None:
        return _own_memory(whole_round(shared, packed), recorded=False)
    # Recordings read the start weights of the program's form.
    key = "round", program.form, shape, spans, shapes, work.cohort_sizes
    num_steps = len(shape[0])
    parts = recorder(key, whole_round, shared, packed) if num_steps <= LONG else None
    if parts is not None:
        return _own_memory(parts, recorded=True)
    take_steps = RecordedSteps(recorder, StepsInPlace(program, model, examples))
    widest = _widest(work)
    parts = program.run(model, examples, widest, spans, shared, unpack(packed), take_steps)
    return _own_memory(parts, recorded=True)


def warm_up(
    program: ClientProgram, model: AnyModel, examples: Examples, shared: Shared, work: Work
) -> None:
    """Compile the kernels of a first round together; in the round they would compile one by one."""
    packed, unpack, _ = PackedInputs.of(
        ClientInputs.of(work, program.numbers), examples.labels.device
    )
    training, widths = _widest(work)
    one_step = training[:1], widths[:1]
    compile_ahead(
        lambda: program.run(model, examples, one_step, work.spans, shared, unpack(packed))
    )


def _widest(work: Work) -> Cuts:
    """The cuts of the plan with the widest batch in every step: all steps have one shape."""
    training, _ = work.plan.cuts
    return training, (work.plan.index.shape[2],) * len(training)


@dataclass(frozen=True)
class StepsInPlace:
    """Take steps in place: overwrite the state of the clients, and return the losses.

    A recording refers to this object, so it must not refer to the recorder: each would keep the
    other in memory.
    """

    program: ClientProgram
    model: AnyModel
    examples: Examples

    def __call__(self, local: Local, now: StepInput) -> Tensor:
        moved, losses = self.program.take_steps(self.model, self.examples, replace(local), now)
        with torch.no_grad():
            for part in ("params", "buffers", "solver"):
                copy_tensors(getattr(moved, part), getattr(local, part))
        return losses


@dataclass
class RecordedSteps:
    """`ClientProgram.take_steps` for one round, recorded: in long rounds BLOCK steps at a time.

    All steps update the clients in place, in the memory of `Recorder.place`, also after some
    clients are done: copying all of them each time would take longer than the steps.
    """

    recorder: Recorder
    in_place: StepsInPlace
    has_begun: bool = False

    def __call__(self, local: Local, now: StepInput) -> tuple[Local, Tensor]:
        local = replace(local, step=None, count=None, loss=None)
        if not self.has_begun:
            local, self.has_begun = self.recorder.place(local), True
        total = len(now.step)
        in_blocks = total // BLOCK * BLOCK if total > LONG else 0
        firsts = [*range(0, in_blocks, BLOCK), *range(in_blocks, total)]
        losses = []
        strides = tuple(t.stride() for t in tensors_in(local))  # they are read in place
        key = "steps", self.in_place.program.form, strides
        for first, end in pairwise([*firsts, total]):
            some = now.at(slice(first, end))
            loss = self.recorder(key, self.in_place, local, some)
            # The next replay overwrites the recorded losses.
            losses.append(self.in_place(local, some) if loss is None else loss.clone())
        return local, torch.cat(losses, 1)


def _own_memory(parts: list[Part], recorded: bool) -> list[Part]:
    """The parts, with copies of what must outlive a recorder's memory, or all clients' tensors."""
    own: list[dict[str, Any]] = []
    for part in parts:
        own.append({"keep": part.keep} if any(part.keep) else {})
        if recorded:
            own[-1]["scalars"] = dict(part.scalars)
            own[-1]["channel_scalars"] = dict(part.channel_scalars)
        if recorded and not part.combined:  # a combined update is added up at once
            own[-1]["update"] = part.update
    return [
        part._replace(**made, borrowed=recorded)
        for part, made in zip(parts, copies(own), strict=True)
    ]
