"""Clients as a batch dimension: many train at once on one device."""

from collections.abc import Iterator
from dataclasses import dataclass

from fedlens.client import ClientProgram, Part, Shared, Work
from fedlens.core import Examples
from fedlens.network import Network


@dataclass
class Stacked:
    """`at_once` clients together; memory follows that number, not the cohort."""

    network: Network
    examples: Examples
    at_once: int = 64

    def map(self, program: ClientProgram, shared: Shared, work: Work) -> Iterator[Part]:
        for start in range(0, len(work), self.at_once):
            mine = work.rows(slice(start, start + self.at_once))
            yield program(self.network.stacked, self.examples, shared, mine)

    def close(self) -> None:
        pass
