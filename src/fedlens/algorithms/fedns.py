"""FedNS (Zhuo and Li, 2021, arXiv:2101.07995), equations 5 and 6, algorithm 3: node by node.

For a node of a hidden layer, v_k is the variance, over the node's fan-in, of client k's update.
Clients whose v_k lies more than two standard deviations from the clients' mean are left out, and
the others have the weight v_k / sum v. The last layer is weighted by class counts (`lastfc`). n_k
plays no role in hidden layers. With one client a round it is FedAvg.

What the paper leaves open: sigma is the population's; a node without variance (frozen, or with a
fan-in of one) is weighted by n_k / n; a bias has the weights of its node, and a normalisation layer
those of the layer before it. It is no defence against hostile clients: two equal outliers among ten
clients lie at exactly 2 sigma, stay, and dominate.
"""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedlens.algorithm import Algorithm, at_least, paper
from fedlens.algorithm.slots import Combine
from fedlens.algorithms.lastfc import by_class, last_layer
from fedlens.core import Cohort, Number, Tree
from fedlens.network.layout import Layout

TOLERANCE = 1e-6  # relative: else float noise drops clients that all have the same variance


@dataclass(frozen=True)
class NodeByNode(Combine):
    sigmas: Number = 2.0
    bias: Literal["tied", "included"] = "tied"
    norm: Literal["tied", "fedavg"] = "tied"
    layer: str | None = None
    uses_shares: ClassVar[bool] = False

    def check(self, layout: Layout) -> None:
        last_layer(layout, self.layer)

    def __call__(self, updates: Tree, shares: Tensor, cohort: Cohort, layout: Layout) -> Tree:
        last = last_layer(layout, self.layer)
        weights = {
            layout.entries[name].layer: self.node_weights(name, updates, cohort, layout)
            for name, u in updates.items()
            if layout.entries[name].role == "weight" and u.ndim > 2
        }
        combined = {}
        for name, u in updates.items():
            layer, _, axis = layout.entries[name]
            if layer in layout.norm_layers and self.norm == "tied":
                layer = layout.norm_layers[layer] or layer
            if layer == last:
                combined[name] = by_class(u, cohort)
                continue
            plain = cohort.size_shares.to(u)[:, None]
            share = weights.get(layer, plain)  # [C, nodes], or [C, 1]
            shape = [1] * (u.ndim - 1)
            if axis is not None:
                shape[axis] = -1
            combined[name] = (share.reshape(len(u), *shape) * u).sum(0)
        return combined

    def node_weights(self, name: str, updates: Tree, cohort: Cohort, layout: Layout) -> Tensor:
        """Each client's share of each node of a layer. [C, nodes]"""
        axis = layout.entries[name].node_axis or 0
        rows = updates[name].movedim(axis + 1, 1).flatten(2)  # [C, nodes, fan-in]
        bias = f"{layout.entries[name].layer}.bias".lstrip(".")
        if self.bias == "included" and bias in updates:
            rows = torch.cat([rows, updates[bias][..., None]], -1)
        v = rows.var(-1, correction=0)
        mean, sigma = v.mean(0), v.std(0, correction=0)
        kept = (v - mean).abs() <= self.sigmas * sigma * (1 + TOLERANCE) + TOLERANCE * mean
        v = torch.where(kept, v, 0)
        total = v.sum(0)
        return torch.where(
            total > 0, v / total.clamp(min=1e-300), cohort.size_shares.to(v)[:, None]
        )


@paper
def fedns(
    base: Algorithm,
    sigmas: Number = 2.0,
    bias: Literal["tied", "included"] = "tied",
    norm: Literal["tied", "fedavg"] = "tied",
    layer: str | None = None,
) -> Algorithm:
    """Weigh clients node by node, by how much each moved the node.

    Args:
        sigmas: how many standard deviations from the mean a client may lie.
        bias: whether a bias only goes with its node, or also counts in its variance.
        norm: whether normalisation layers go with the layer before them, or by n_k / n.
        layer: the last layer, if it is not the model's last linear one.
    """
    at_least(sigmas, 0, "fedns: sigmas")
    return replace(
        base,
        combine=NodeByNode(sigmas, bias, norm, layer),
        discloses=base.discloses | {"label_counts"},
    )
