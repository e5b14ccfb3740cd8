"""FedAvg+lastFC (Zhuo and Li, "FedNS", 2021, arXiv:2101.07995): the last layer by class counts.

Node c of the last layer decides class c, so its weights and bias are averaged by n_k^c / n^c, the
clients' examples of that class; a class that no client of a round holds is averaged by n_k / n. All
other layers are averaged as in FedAvg. With equal shares of classes at all clients it is FedAvg. It
cannot be combined with another weighting of clients: the last layer would not follow that, and
would move by a step of its own.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from fedlens.algorithm import Algorithm, paper
from fedlens.algorithm.pieces import WeightedSum
from fedlens.algorithm.slots import Combine
from fedlens.core import Cohort, Tree
from fedlens.network.layout import Layout


def last_layer(layout: Layout, named: str | None) -> str:
    """The layer whose nodes are the classes: the one named, else the model's last linear one."""
    layers = {entry.layer for entry in layout.entries.values()}
    if named is not None and named not in layers:
        raise ValueError(f"layer is {named!r}: the model has {', '.join(sorted(layers))}")
    found = named if named is not None else layout.last
    if found is None:
        raise ValueError("the model has no linear layer to be its last: name one with layer = ...")
    return found


def by_class(update: Tensor, cohort: Cohort) -> Tensor:
    """Updates [C, nodes, ...] of a last layer, each node summed by the shares of its class."""
    assert cohort.label_shares is not None
    shares = cohort.label_shares.to(update)  # [C, L]
    spare = update.shape[1] - shares.shape[1]  # a head may have more outputs than classes
    if spare > 0:
        others = cohort.size_shares.to(update)[:, None].expand(-1, spare)
        shares = torch.cat([shares, others], 1)
    return (shares.view(*shares.shape, *[1] * (update.ndim - 2)) * update).sum(0)


@dataclass(frozen=True)
class LastLayerByClass(Combine):
    layer: str | None = None
    linear: ClassVar[bool] = True
    uses_shares: ClassVar[bool] = False  # not in the last layer

    def check(self, layout: Layout) -> None:
        last_layer(layout, self.layer)

    def __call__(self, updates: Tree, shares: Tensor, cohort: Cohort, layout: Layout) -> Tree:
        last = last_layer(layout, self.layer)
        mine = {
            n: by_class(u, cohort) for n, u in updates.items() if layout.entries[n].layer == last
        }
        others = {n: u for n, u in updates.items() if n not in mine}
        return WeightedSum()(others, shares, cohort, layout) | mine


@paper
def lastfc(base: Algorithm, layer: str | None = None) -> Algorithm:
    """Average the last layer class by class.

    Args:
        layer: the last layer, if it is not the model's last linear one.
    """
    return replace(
        base,
        combine=LastLayerByClass(layer),
        discloses=base.discloses | {"label_counts"},
    )
