"""A model of C clients at once, layer by layer: what `stacked` makes of any module it can read.

Convolutions and linear layers become batched products, one matrix a client. Images of all clients
lie one after another, so that pooling and the like run on them as on one large batch. A layer that
is not known here is mapped over the clients by vmap; a module whose forward pass cannot be read at
all (`stack` then gives None) is so as a whole.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.func import functional_call, vmap

from fedlens.core import Tree
from fedlens.layers import KeyedDropout, MaskedBatchNorm, keyed_dropout
from fedlens.models.pool import AdaptivePool
from fedlens.products import convolve, linear

POOLS = (nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, AdaptivePool)
PLAIN_LAYERS = (
    *POOLS,
    nn.ReLU,
    nn.ReLU6,
    nn.Tanh,
    nn.Sigmoid,
    nn.SiLU,
    nn.GELU,
    nn.Identity,
)  # they treat every channel, or every number, alike
PLAIN_FUNCTIONS = (operator.add, operator.iadd, torch.add, torch.relu, F.relu, F.relu6)


@dataclass(frozen=True)
class Activations:
    """What a layer gives for C clients: images [C * B, channels, H, W], or rows [C, B, features].

    Images lie in memory channels last: what a convolution gives needs no copy on its way on.
    """

    tensor: Tensor
    clients: int
    is_images: bool

    def by_client(self) -> Tensor:  # [C, B, ...]
        if not self.is_images:
            return self.tensor
        return self.tensor.view(self.clients, -1, *self.tensor.shape[1:])

    @classmethod
    def of(cls, tensor: Tensor) -> Activations:
        """From [C, B, ...]."""
        if tensor.ndim == 5:
            images = tensor.flatten(0, 1).contiguous(memory_format=torch.channels_last)
            return cls(images, len(tensor), True)
        return cls(tensor, len(tensor), False)


class Stacking:
    """A module's forward pass, read once, over parameters with a leading client axis."""

    def __init__(self, module: nn.Module, graph: fx.Graph) -> None:
        self.nodes = list(graph.nodes)
        self.layers = dict(module.named_modules())

    def __call__(self, tensors: Tree, images: Tensor, key: Tensor, mask: Tensor) -> Tensor:
        """(parameters and buffers [C], images [C, B], key [C], mask [C, B]) -> logits [C, B, L]"""
        values: dict[str, Any] = {}
        calls: Counter[str] = Counter()
        for node in self.nodes:
            arguments = fx.node.map_arg(node.args, lambda n: values[n.name])
            if node.op == "placeholder":
                values[node.name] = Activations.of(images)
            elif node.op == "call_module":
                (x,) = arguments
                name = str(node.target)
                values[node.name] = self._layer(name, x, tensors, key, mask, calls[name])
                calls[name] += 1
            elif node.op == "call_function":
                values[node.name] = _function(node.target, arguments)
            else:  # the output
                result: Tensor = arguments[0].by_client()
        return result

    def _layer(
        self, name: str, x: Activations, tensors: Tree, key: Tensor, mask: Tensor, call: int
    ) -> Activations:
        layer, clients = self.layers[name], x.clients
        names = (*layer._parameters, *layer._buffers)
        own = {key: tensors[f"{name}.{key}"] for key in names if f"{name}.{key}" in tensors}
        if isinstance(layer, nn.Conv2d) and x.is_images and layer.padding_mode == "zeros":
            return Activations(_convolution(layer, x, own), clients, True)
        if isinstance(layer, nn.Linear) and not x.is_images and x.tensor.ndim == 3:
            return Activations(linear(x.tensor, own["weight"], own.get("bias")), clients, False)
        if isinstance(layer, nn.GroupNorm) and x.is_images:
            y = F.group_norm(x.tensor, layer.num_groups, eps=layer.eps)
            if "weight" in own:
                scale, shift = (own[key][:, None, :, None, None] for key in ("weight", "bias"))
                y = (Activations(y, clients, True).by_client() * scale + shift).flatten(0, 1)
            return Activations(y.contiguous(memory_format=torch.channels_last), clients, True)
        if isinstance(layer, nn.Flatten) and (layer.start_dim, layer.end_dim) == (1, -1):
            return Activations(x.by_client().flatten(2), clients, False)
        if getattr(layer, "inplace", False):  # what it writes over, a gradient may still need
            x = Activations(x.tensor.clone(), clients, x.is_images)
        if isinstance(layer, PLAIN_LAYERS) and (x.is_images or not isinstance(layer, POOLS)):
            return Activations(layer(x.tensor), clients, x.is_images)
        if isinstance(layer, KeyedDropout):
            return self._dropout(layer, x, key, call)
        if isinstance(layer, MaskedBatchNorm):
            own["mask"] = mask
        mapped = vmap(lambda tree, rows: functional_call(layer, tree, (rows,)))
        return Activations.of(mapped(own, x.by_client()))

    @staticmethod
    def _dropout(layer: KeyedDropout, x: Activations, key: Tensor, call: int) -> Activations:
        if not layer.training:
            return x

        def drop(rows: Tensor, k: Tensor) -> Tensor:
            return keyed_dropout(rows, k, layer.p, layer.layer, call=call, channels=layer.channels)

        return Activations.of(vmap(drop)(x.by_client(), key))


def _convolution(layer: nn.Conv2d, x: Activations, own: Tree) -> Tensor:
    """Every client's images under its own kernels."""
    clients, bias = x.clients, own.get("bias")
    plain = layer.stride == layer.dilation == (1, 1) and layer.groups == 1
    if plain and not isinstance(layer.padding, str):
        rows, columns = layer.padding
        return convolve(x.tensor, own["weight"], bias, (columns, columns, rows, rows))
    if plain and layer.padding == "same":
        height, width = layer.kernel_size
        top, left = (height - 1) // 2, (width - 1) // 2
        sides = (left, width - 1 - left, top, height - 1 - top)
        return convolve(x.tensor, own["weight"], bias, sides)
    # Any other: clients as groups of channels.
    images = x.by_client().transpose(0, 1).flatten(1, 2)  # [B, C * channels, H, W]
    geometry: Any = layer.stride, layer.padding, layer.dilation, clients * layer.groups
    flat = None if bias is None else bias.flatten()
    y = F.conv2d(images, own["weight"].flatten(0, 1), flat, *geometry)
    y = y.view(len(y), clients, -1, *y.shape[2:]).transpose(0, 1).flatten(0, 1)
    return y.contiguous(memory_format=torch.channels_last)


def stack(module: nn.Module) -> Stacking | None:
    """The module as a stack of layers, or None if its forward pass is more than that."""
    if len(list(module.named_parameters(remove_duplicate=False))) > len(list(module.parameters())):
        return None  # layers that share weights have them under one name only
    try:
        graph = _Reader().trace(module)
    except Exception:  # whatever a user's forward pass does when it is read symbolically
        return None
    readable = all(_is_readable(node) for node in graph.nodes)
    return Stacking(module, graph) if readable else None


class _Reader(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return not any(True for _ in m.children())


def _is_readable(node: fx.Node) -> bool:
    if node.op == "call_module":
        return len(node.args) == 1 and not node.kwargs
    if node.op == "call_function":
        flattens = node.target is torch.flatten and tuple(node.args[1:]) == (1,)
        return not node.kwargs and (flattens or node.target in PLAIN_FUNCTIONS)
    return node.op in ("placeholder", "output")


def _function(function: Any, arguments: tuple[Any, ...]) -> Activations:
    first = next(a for a in arguments if isinstance(a, Activations))
    if function is torch.flatten:
        return Activations(first.by_client().flatten(2), first.clients, False)
    if function is operator.iadd:  # in place it could spoil what another branch reads
        function = operator.add
    tensors = [a.tensor if isinstance(a, Activations) else a for a in arguments]
    call: Callable[..., Tensor] = function
    return Activations(call(*tensors), first.clients, first.is_images)
