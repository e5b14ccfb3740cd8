"""What an engine is."""

from collections.abc import Iterator
from typing import Protocol

from fedlens.client import ClientProgram
from fedlens.work import Part, Shared, Work


class Engine(Protocol):
    """How to run the client program over a cohort.

    An engine has the model and the examples from the start, on its own device. `map` gives the
    parts of the cohort back in cohort order, as they are done, so memory follows the part.
    """

    def map(self, program: ClientProgram, shared: Shared, work: Work) -> Iterator[Part]: ...

    def close(self) -> None:
        """Give back what the engine holds. It can be used again afterwards."""
        ...
