"""Clients as a batch dimension: many train at once on one device."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from fedlens.client import ClientProgram, Record
from fedlens.core import Examples
from fedlens.engines.factored import Factored, factorable
from fedlens.engines.graphs import Graphs
from fedlens.network import Network
from fedlens.work import Part, Shared, Work


@dataclass
class Stacked:
    """`at_once` clients together; memory follows that number, not the cohort.

    On a GPU local training is recorded as CUDA graphs: small clients are many small kernels, and
    without that the time goes into launching them. `factor` says whether linear layers may be
    factored where that pays.
    """

    network: Network
    examples: Examples
    at_once: int = 64
    factor: bool = True
    _made: tuple[ClientProgram, Record | None, dict[tuple[str, ...], Factored]] | None = field(
        default=None, repr=False
    )

    def map(self, program: ClientProgram, shared: Shared, work: Work) -> Iterator[Part]:
        if self._made is None or self._made[0] is not program:
            self._made = program, self._recorder(), {}
        _, record, factored = self._made
        shared = shared._replace(params=self.network.laid_out(shared.params))
        for start in range(0, len(work), self.at_once):
            mine = work.rows(slice(start, start + self.at_once))
            names = factorable(self.network, program, mine) if self.factor else ()
            if not names:
                yield from program(self.network.stacked, self.examples, shared, mine, record)
                continue
            if names not in factored:
                factored[names] = Factored(self.network, program, names)
            form = factored[names]
            sent = form.send(shared, mine)
            yield from form.receive(form.program(form.apply, self.examples, sent, mine, record))

    def _recorder(self) -> Record | None:
        return Graphs() if self.examples.labels.is_cuda else None

    def close(self) -> None:
        self._made = None
