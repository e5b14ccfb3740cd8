"""What an engine is."""

from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar, Protocol

from torch import Tensor

from fedlens.client import ClientProgram
from fedlens.core import Examples, Tree
from fedlens.network.network import Network
from fedlens.work import Part, Shared, Work

Which = slice | Tensor
"""Some of the examples, by their positions."""

Predict = Callable[[Tree, Examples, Sequence[Which]], Iterator[Tensor]]
"""(model, examples, batches) -> the logits [B, L] of one batch after another."""


class Engine(Protocol):
    """How to run the client program over a cohort.

    An engine has the model and the examples from the start, on its own device. `map` gives the
    parts of the cohort back in cohort order, as they are done, so memory follows the part.
    """

    name: ClassVar[str]  # as `engine` in an experiment

    def map(self, program: ClientProgram, shared: Shared, work: Work) -> Iterator[Part]: ...

    def close(self) -> None:
        """Give back what the engine holds. It can be used again afterwards."""
        ...


def predict(
    network: Network, model: Tree, examples: Examples, batches: Sequence[Which]
) -> Iterator[Tensor]:
    """The logits [B, L] of one batch of examples after another, in this process."""
    for which in batches:
        yield network.predict(model, {}, examples.read(which))
