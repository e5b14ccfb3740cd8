"""personal: what of a model is each client's own, and the steps of a second model."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar, Protocol

from fedlens.algorithm.slots import OWN, Personal, Wraps
from fedlens.core import Local, Memory, Moved, Tree
from fedlens.network.layout import Layout

OF_THE_OTHERS = "updates of the layers that are not its own"


@dataclass(frozen=True)
class OwnNorms(Personal):
    """Normalisation layers. The server averages them all the same."""

    averaged: ClassVar[bool] = True

    def names(self, layout: Layout) -> Collection[str]:
        return layout.norm_names


@dataclass(frozen=True)
class OwnModel(Personal):
    """The whole model."""

    sends: str = "empty updates"

    def names(self, layout: Layout) -> Collection[str]:
        return [*layout.entries]


@dataclass(frozen=True)
class SecondModel(Personal):
    """A whole model, which a client trains beside the server's: `solve` is `TwoModels`."""

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
    sends: str = OF_THE_OTHERS

    def names(self, layout: Layout) -> Collection[str]:
        head = OwnHead(self.head).names(layout)
        return [name for name in layout.entries if name not in head]


@dataclass(frozen=True)
class OwnHead(Personal):
    """The head: the last linear layer, or `layer` with all that is in it."""

    layer: str | None = None
    tune: int = 0
    sends: str = OF_THE_OTHERS

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


_MINE = f"{OWN}."


class TwoModels(Wraps, Protocol):
    """Steps of two models, by `inner`, each with a memory of its own; the second is called OWN."""

    @property
    def reads_batch(self) -> bool:
        return True

    @property
    def carries(self) -> frozenset[str]:
        return self.inner.carries | {_MINE + name for name in self.inner.carries}

    def init(self, params: Tree) -> Memory:
        mine = {_MINE + name: tree for name, tree in self.inner.init(params).items()}
        return self.inner.init(params) | mine

    def step_both(
        self, grads: Tree, own_grads: Tree, memory: Memory, params: Tree, local: Local
    ) -> Moved:
        """A step of each model, along gradients of its own."""
        names = [name for name in memory if _MINE + name in memory]
        remembered = {name: memory[name] for name in names}
        params, first = self.inner.update(grads, remembered, params, local)
        mine = {name: memory[OWN][name] for name in own_grads}
        own = {name: memory[_MINE + name] for name in names}
        moved, second = self.inner.update(own_grads, own, mine, local)
        kept = {_MINE + name: tree for name, tree in second.items()}
        return params, memory | first | kept | {OWN: memory[OWN] | moved}
