"""personal: what of a model is each client's own."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar

from fedlens.algorithm.slots import Personal
from fedlens.core import Tree
from fedlens.network.layout import Layout


@dataclass(frozen=True)
class OwnNorms(Personal):
    """Normalisation layers. The server averages them all the same."""

    averaged: ClassVar[bool] = True

    def names(self, layout: Layout) -> Collection[str]:
        return layout.norm_names


@dataclass(frozen=True)
class OwnModel(Personal):
    """The whole model."""

    sends: str = "nothing"  # what a client sends instead of it

    def names(self, layout: Layout) -> Collection[str]:
        return [*layout.entries]


@dataclass(frozen=True)
class SecondModel(Personal):
    """A whole model, which a client trains beside the server's."""

    beside: ClassVar[bool] = True

    def names(self, layout: Layout) -> Collection[str]:
        return [*layout.entries]


@dataclass(frozen=True)
class Tuned(Personal):
    """Nothing: the server's model, tuned at the end of the run."""

    tune: int
    averaged: ClassVar[bool] = True


@dataclass(frozen=True)
class OwnBody(Personal):
    """All layers but the head."""

    head: str | None = None

    def names(self, layout: Layout) -> Collection[str]:
        head = OwnHead(self.head).names(layout)
        return [name for name in layout.entries if name not in head]


@dataclass(frozen=True)
class OwnHead(Personal):
    """The head: the last linear layer, or `layer` with all that is in it."""

    layer: str | None = None
    tune: int = 0

    def names(self, layout: Layout) -> Collection[str]:
        head = layout.last if self.layer is None else self.layer
        names = [
            name
            for name, entry in layout.entries.items()
            if head is not None and f"{entry.layer}.".startswith(f"{head}.")
        ]
        if not names or len(names) == len(layout.entries):
            layers = ", ".join(dict.fromkeys(e.layer for e in layout.entries.values()))
            wrong = "is all of the model" if names else "is not in the model"
            raise ValueError(f"the head {head!r} {wrong}: choose one of its layers, {layers}")
        return names


def head_of(params: Tree, layer: str | None, axes: int = 0) -> list[str]:
    """The parameters of the head, where there is no layout; `axes` stand before those of tensors.

    It is the layer of the last matrix, if none is named.
    """
    matrices = [name for name, p in params.items() if p.ndim == 2 + axes]
    head = matrices[-1].rpartition(".")[0] if layer is None and matrices else layer
    return [name for name in params if head is not None and name.startswith(f"{head}.")]
