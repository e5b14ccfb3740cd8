"""One client after another: the reference that every other engine must agree with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedlens.client import ClientProgram
from fedlens.engines.engine import Engine
from fedlens.engines.recording import run_program
from fedlens.federation import Examples
from fedlens.network.model import Model
from fedlens.network.network import Network
from fedlens.work import Part, Shared, Work


@dataclass
class Sequential(Engine):
    network: Network
    examples: Examples
    fast: bool = False  # use layers that do less work and round differently
    name: ClassVar[str] = "sequential"

    def map(self, program: ClientProgram, shared: Shared, work: Work) -> Iterator[Part]:
        model = self.network.single
        if self.fast:
            model = self._fast_model(program)
            shared = shared._replace(params=self.network.lay_out_single(shared.params))
        for client in range(len(work)):
            mine = work.rows(slice(client, client + 1))
            yield from run_program(program, model, self.examples, shared, mine)

    @property
    def predicts_fast(self) -> bool:
        return self.fast

    def _fast_model(self, program: ClientProgram) -> Model:
        """The fast model. With plain SGD its layers apply their steps in the backward pass."""
        step = program.algorithm.local_step
        if step is None or not step.is_plain or isinstance(step.lr, Tensor):
            return self.network.fast(None)
        return self.network.fast(step.lr)
