"""One client after another: the reference that every other engine must agree with."""

from collections.abc import Iterator
from dataclasses import dataclass

from fedlens.client import ClientProgram
from fedlens.core import Examples
from fedlens.network import Network
from fedlens.work import Part, Shared, Work


@dataclass
class Sequential:
    network: Network
    examples: Examples

    def map(self, program: ClientProgram, shared: Shared, work: Work) -> Iterator[Part]:
        for client in range(len(work)):
            mine = work.rows(slice(client, client + 1))
            yield from program(self.network.one, self.examples, shared, mine)

    def close(self) -> None:
        pass
