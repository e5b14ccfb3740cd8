"""One client after another: the reference that every other engine must agree with."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from fedlens.client import ClientProgram
from fedlens.core import Examples
from fedlens.network.network import Network
from fedlens.network.single.layers import Hurried, Hurry
from fedlens.work import Part, Shared, Work


@dataclass
class Sequential:
    name: ClassVar[str] = "sequential"

    network: Network
    examples: Examples
    hurried: bool = False  # layers save work, and round differently

    def map(self, program: ClientProgram, shared: Shared, work: Work) -> Iterator[Part]:
        hurry = Hurry(program.algorithm.rate)
        apply = Hurried(self.network.hurried, hurry) if self.hurried else self.network.one
        if self.hurried:
            shared = shared._replace(params=self.network.laid_out_alone(shared.params))
        for client in range(len(work)):
            mine = work.rows(slice(client, client + 1))
            yield from program(apply, self.examples, shared, mine)

    def close(self) -> None:
        pass
