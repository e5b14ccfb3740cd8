"""What stands between updates and a robust combination: `bucketing` and `nnm`."""

from collections.abc import Callable
from typing import ClassVar, Protocol

from torch import Tensor

from fedlens.algorithm import Algorithm
from fedlens.algorithm.slots import Combine
from fedlens.config.names import TRUST
from fedlens.core import Memory, Tree
from fedlens.network.layout import Layout


class Before(Combine, Protocol):
    """`inner`, of something else than the updates."""

    inner: Combine
    uses_shares: ClassVar[bool] = False
    reads_cohort: ClassVar[bool] = False

    def check(self, layout: Layout) -> None:
        self.inner.check(layout)

    def init(self, params: Tree) -> Memory:
        return self.inner.init(params)


def check_before(base: Algorithm, name: str) -> None:
    if base.combine.reads_cohort:
        raise ValueError(
            f"{name}: what it goes before reads more of clients than their updates: name median, "
            f"trimmed-mean, krum or centred-clipping, and {name} after it"
        )


def traced(memory: Memory, back: Callable[[Tensor], Tensor]) -> Memory:
    """The memory with what clients count, from what the rows that `inner` got count."""
    if TRUST not in memory:
        return memory
    return memory | {TRUST: {TRUST: back(memory[TRUST][TRUST])}}
