"""A network whose first layers are frozen, cut into these and the rest.

What frozen layers make of an image, its features, never changes. A run computes them once, and
trains the rest on them, at the price of a small model.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, fx, nn

from fedlens.network.layers import KeyedDropout
from fedlens.network.network import Network
from fedlens.network.ops import normalise


class Cut(NamedTuple):
    whole: Network
    frozen: fx.GraphModule  # its first layers
    head: Network  # the rest, with the names that layers have in the whole

    def features(self, images: Tensor) -> Tensor:  # [B, channels, H, W] -> [B, F, h, w]
        whole, frozen = self.whole, self.frozen.to(images.device)
        with torch.no_grad():
            out: Tensor = frozen(normalise(images, whole.mean, whole.std, whole.dtype))
        return out if out.ndim == 4 else out[:, :, None, None]


def cut(network: Network, image: Tensor) -> Cut | None:
    """Cut before the first trained layer; None unless frozen layers come first, and there alone.

    From the cut on the forward pass must be a chain, and before it nothing may change from step to
    step, such as dropout.
    """
    nodes, layers = network.nodes, dict(network.module.named_modules())
    own = {node: layers[str(node.target)] for node in nodes if node.op == "call_module"}
    trained = [n for n, layer in own.items() if any(p.requires_grad for p in layer.parameters())]
    if not trained:
        return None
    at = nodes.index(trained[0])
    while isinstance(own.get(nodes[at - 1]), KeyedDropout):
        at -= 1
    before, rest = nodes[:at], nodes[at:]
    if before[-1].op == "placeholder":
        return None
    chained = all(
        node.all_input_nodes == [previous] == [*node.args[:1]] and len(previous.users) == 1
        for previous, node in pairwise((before[-1], *rest[:-1]))
    )
    if not chained or any(isinstance(own.get(node), KeyedDropout) for node in before):
        return None
    frozen = _first(network.module, before)
    if network.buffers.keys() & dict(frozen.named_buffers()).keys():
        return None
    with torch.no_grad():
        is_flat = frozen(normalise(image, network.mean, network.std, network.dtype)).ndim == 2
    module = Chain(network.module, rest[:-1], is_flat=is_flat)
    inside = dict(module.named_parameters()) | dict(module.named_buffers())
    kept = {name: t for name, t in network.frozen.items() if name not in inside}
    head = Network(module, None, None, network.dtype, network.compute, kept=kept)
    return Cut(network, frozen, head)


def _first(root: nn.Module, nodes: Sequence[fx.Node]) -> fx.GraphModule:
    """The first nodes of a forward pass, in evaluation."""
    graph, made = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in nodes:
        made[node] = graph.node_copy(node, made.__getitem__)
    graph.output(made[nodes[-1]])
    part = fx.GraphModule(root, graph)
    part.eval()
    return part


class Chain(nn.Module):
    """The last nodes of a forward pass, each of which has the result of the one before."""

    def __init__(self, root: nn.Module, nodes: Sequence[fx.Node], *, is_flat: bool) -> None:
        super().__init__()
        self.steps = [(n.op, n.target, tuple(n.args[1:]), dict(n.kwargs)) for n in nodes]
        self.is_flat = is_flat  # whether the first takes rows, not images
        for node in nodes:
            if node.op == "call_module":
                self._add(str(node.target), root.get_submodule(str(node.target)))

    def _add(self, path: str, layer: nn.Module) -> None:
        *outer, name = path.split(".")
        place: nn.Module = self
        for part in outer:
            if part not in dict(place.named_children()):
                place.add_module(part, nn.Module())
            place = place.get_submodule(part)
        place.add_module(name, layer)

    def forward(self, x: Tensor) -> Tensor:
        if self.is_flat:
            x = torch.flatten(x, 1)
        for op, target, args, options in self.steps:
            if op == "call_module":
                x = self.get_submodule(str(target))(x)
            elif op == "call_method":
                x = getattr(x, str(target))(*args, **options)
            else:
                assert callable(target)
                x = target(x, *args, **options)
        return x
