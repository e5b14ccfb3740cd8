"""A network whose first layers are frozen, cut into these and the rest.

What frozen layers make of an image, its features, never changes. A run computes them once, and
trains the rest on them, at the price of a small model.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    """Cut before the first trained layer; None unless frozen layers alone come before it.

    All that follows must read one result of what is cut off, which must have no more numbers than
    an image, and in which nothing may change from step to step, such as dropout.
    """
    nodes, layers = network.nodes, dict(network.module.named_modules())
    own = {node: layers[str(node.target)] for node in nodes if node.op == "call_module"}
    trained = [n for n, layer in own.items() if any(p.requires_grad for p in layer.parameters())]
    if not trained:
        return None
    at = nodes.index(trained[0])
    while at > 1 and (isinstance(own.get(nodes[at - 1]), KeyedDropout) or _leaks(nodes, at)):
        at -= 1
    before = nodes[:at]
    if at < 2 or any(isinstance(own.get(node), KeyedDropout) for node in before):
        return None
    frozen = _first(network.module, before)
    if network.buffers.keys() & dict(frozen.named_buffers()).keys():
        return None
    with torch.no_grad():
        made = frozen(normalise(image, network.mean, network.std, network.dtype))
    if made.numel() > image.numel():
        return None
    module = Rest(network.module, nodes[at - 1 :], is_flat=made.ndim == 2)
    inside = dict(module.named_parameters()) | dict(module.named_buffers())
    kept = {name: t for name, t in network.frozen.items() if name not in inside}
    head = Network(module, None, None, network.dtype, network.compute, kept=kept)
    return Cut(network, frozen, head)


def _leaks(nodes: Sequence[fx.Node], at: int) -> bool:
    """Whether nodes from this one on read anything before it but the last result."""
    known = {*nodes[at - 1 :]}
    return any(one not in known for node in nodes[at:] for one in node.all_input_nodes)


def _first(root: nn.Module, nodes: Sequence[fx.Node]) -> fx.GraphModule:
    """The first nodes of a forward pass, in evaluation."""
    graph, made = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in nodes:
        made[node] = graph.node_copy(node, made.__getitem__)
    graph.output(made[nodes[-1]])
    part = fx.GraphModule(root, graph)
    part.eval()
    return part


class Result(NamedTuple):
    """What a node computed, by the node's place."""

    of: int


class Rest(nn.Module):
    """The last nodes of a forward pass, after the first of them, whose result they are given.

    Copies of an `fx.GraphModule` would lose its hooks.
    """

    def __init__(self, root: nn.Module, nodes: Sequence[fx.Node], *, is_flat: bool) -> None:
        super().__init__()
        place = {node: Result(i) for i, node in enumerate(nodes)}
        self.is_flat = is_flat  # whether the first result is rows, not images
        self.steps = []
        for node in nodes[1:-1]:
            args = [place[one] if isinstance(one, fx.Node) else one for one in node.args]
            self.steps.append((node.op, node.target, args, dict(node.kwargs)))
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
        results = [torch.flatten(x, 1) if self.is_flat else x]
        for op, target, args, options in self.steps:
            first, *others = (results[a.of] if isinstance(a, Result) else a for a in args)
            if op == "call_module":
                results.append(self.get_submodule(str(target))(first))
            elif op == "call_method":
                results.append(getattr(first, str(target))(*others, **options))
            else:
                assert callable(target)
                results.append(target(first, *others, **options))
        return results[-1]
