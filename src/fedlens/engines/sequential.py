"""One client after another: the reference that every other engine must agree with."""

from collections.abc import Iterator
from dataclasses import dataclass

from fedlens.client import ClientProgram
from fedlens.core import Examples
from fedlens.network.network import Network
from fedlens.work import Part, Shared, Work


@dataclass
class Sequential:
    network: Network
    examples: Examples
    fast: bool = False  # layers save work, and round differently

    def map(self, program: ClientProgram, shared: Shared, work: Work) -> Iterator[Part]:
        model = self.network.fast(program.algorithm.rate) if self.fast else self.network.single
        if self.fast:
            shared = shared._replace(params=self.network.lay_out_single(shared.params))
        for client in range(len(work)):
            mine = work.rows(slice(client, client + 1))
            yield from program(model, self.examples, shared, mine)

    def close(self) -> None:
        pass
