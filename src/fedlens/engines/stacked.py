"""Clients as a batch dimension: many train at once on one device."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from fedlens.client import ClientProgram, Part, Shared, Work
from fedlens.core import Examples
from fedlens.engines.graphs import Graphs
from fedlens.network import Network


@dataclass
class Stacked:
    """`at_once` clients together; memory follows that number, not the cohort.

    On a GPU the steps are recorded as CUDA graphs: small clients are many small kernels, and
    without that the time goes into launching them.
    """

    network: Network
    examples: Examples
    at_once: int = 64
    _graphs: tuple[ClientProgram, Graphs] | None = field(default=None, repr=False)

    def map(self, program: ClientProgram, shared: Shared, work: Work) -> Iterator[Part]:
        execute = self._recorder(program) if self.examples.labels.is_cuda else None
        for start in range(0, len(work), self.at_once):
            mine = work.rows(slice(start, start + self.at_once))
            yield from program(self.network.stacked, self.examples, shared, mine, execute)

    def _recorder(self, program: ClientProgram) -> Graphs:
        if self._graphs is None or self._graphs[0] is not program:
            self._graphs = program, Graphs()
        return self._graphs[1]

    def close(self) -> None:
        self._graphs = None
