"""One client after another: the reference that every other engine must agree with."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from torch import Tensor

from fedlens.core.federation import Examples
from fedlens.engines.recording import run_program
from fedlens.network.network import Network
from fedlens.network.private import AnyModel
from fedlens.rounds.client import ClientProgram
from fedlens.rounds.engine import Engine
from fedlens.rounds.work import Part, Shared, Work


def sequential(network: Network, examples: Examples, *_: object) -> Engine:
    """One client after another, in this process: the reference."""
    return Sequential(network, examples)


@dataclass
class Sequential(Engine):
    network: Network
    examples: Examples
    fast: bool = False  # use layers that do less work and round differently
    name: ClassVar[str] = "sequential"

    def map(self, program: ClientProgram, shared: Shared, work: Work) -> Iterator[Part]:
        model: AnyModel = self.network.single
        if program.is_private:
            model = self.network.private
        elif self.fast:
            model = self._fast_model(program)
            shared = shared._replace(params=self.network.lay_out_single(shared.params))
        for client in range(len(work)):
            mine, take_steps = work.rows(slice(client, client + 1)), None
            if self.on_step is not None:  # somebody listens
                taken = map(partial(self.on_step, work, client), itertools.count(1))
                on_step = partial(next, taken)
                take_steps = partial(program.take_steps, model, self.examples, on_step=on_step)
            yield from run_program(
                program, model, self.examples, shared, mine, take_steps=take_steps
            )

    @property
    def predicts_fast(self) -> bool:
        return self.fast

    def _fast_model(self, program: ClientProgram) -> AnyModel:
        """The fast model. With plain SGD its layers apply their steps in the backward pass."""
        step = program.algorithm.local_step
        if step is None or not step.is_plain or isinstance(step.lr, Tensor):
            return self.network.fast(None)
        return self.network.fast(step.lr)
