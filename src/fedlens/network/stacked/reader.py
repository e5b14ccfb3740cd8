"""A module's forward pass, traced once and run for C clients at once.

Convolutions and linear layers become batched products, one matrix a client, together with the ReLU
and the pooling that follow them; normalisation includes the addition and the ReLU behind it. The
images of all clients are stored one after another, so that pooling and the like run on one large
batch. A module whose forward pass cannot be traced does not run here: `read_module` returns None.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from fedlens.core import Tree
from fedlens.network.layers import KeyedDropout
from fedlens.network.pool import Windows, windows_of
from fedlens.network.stacked.epilogue import Epilogue, KeyedMask
from fedlens.network.stacked.layers import (
    MAPPED,
    Activations,
    Form,
    LayerInput,
    flatten,
    form_of,
    is_whole,
    mask_of,
)
from fedlens.network.stacked.products import Factors

ADDITIONS = (operator.add, operator.iadd, torch.add)
PLAIN_FUNCTIONS = (*ADDITIONS, torch.relu, F.relu, F.relu6)

Run = Callable[[Form, nn.Module, Activations, LayerInput], Activations]
"""Runs a layer in its form."""


class StackedModule:
    """The forward pass, over parameters with a leading client axis."""

    def __init__(self, module: nn.Module, graph: fx.Graph) -> None:
        self.nodes = list(graph.nodes)
        self.layers = dict(module.named_modules())
        self.forms: dict[fx.Node, Form] = {}
        self.epilogues: dict[fx.Node, Epilogue] = {}
        self.absorbed: dict[fx.Node, fx.Node] = {}  # node -> the layer that computes it too
        self.added: dict[fx.Node, fx.Node] = {}  # layer -> the node whose result is added to it
        self.drops: dict[fx.Node, str] = {}  # layer -> the name of the dropout behind it
        self.ends = {node: node for node in self.nodes}  # layer -> the last node it absorbs
        self.rows: set[fx.Node] = set()  # nodes whose result is always rows [C, B, n]
        for node in self.nodes:
            layer = self._layer(node)
            self.forms[node] = MAPPED if layer is None else form_of(layer)
            self._absorb(node)
            if self._gives_rows(node):
                self.rows.add(node)

    def __call__(
        self,
        tensors: Tree,
        cast: Callable[[Tree], Tree],
        images: Tensor,
        key: Tensor,
        mask: Tensor,
        run: Run = Form.__call__,
    ) -> Tensor:
        """(parameters and buffers [C], images [C, B], key [C], mask [C, B]) -> logits [C, B, L]

        `cast` converts tensors to the dtype of the images, for the layers that need it; `run` runs
        each layer.
        """
        values: dict[fx.Node, Any] = {}
        calls: Counter[str] = Counter()
        for end in self.nodes:
            node = self.absorbed.get(end, end)
            if self.ends[node] is not end:
                continue
            arguments = fx.node.map_arg(node.args, values.__getitem__)
            if node.op == "placeholder":
                values[end] = Activations.of(images)
            elif node.op == "call_module":
                name, epilogue = str(node.target), self.epilogues[node]
                if node in self.added:
                    epilogue = replace(epilogue, around=values[self.added[node]].tensor)
                if node in self.drops:
                    epilogue = replace(epilogue, mask=self._mask(node, key, calls))
                given = LayerInput(
                    name,
                    self._own(name, tensors),
                    cast,
                    key,
                    mask,
                    calls[name],
                    epilogue,
                    self._flattens(node) and self._is_by_pixel(node, arguments[0], tensors),
                )
                values[end] = run(self.forms[node], self.layers[name], arguments[0], given)
                calls[name] += 1
            elif self._flattens(node):
                by_pixel = self._is_by_pixel(node, arguments[0], tensors)
                values[node] = flatten(arguments[0], by_pixel=by_pixel)
            elif node.op == "call_function":
                values[node] = _function(node.target, arguments)
            elif node.op == "call_method":
                values[node] = _mean_of_channels(arguments[0])
            else:  # the output
                result: Tensor = arguments[0].by_client()
        return result

    def takes_rows(self, name: str) -> bool:
        """Whether a layer is called once in the forward pass, with rows [C, B, n]."""
        calls = self._calls(name)
        return len(calls) == 1 and calls[0].args[0] in self.rows

    def flattened_channels(self, name: str) -> int | None:
        """The channels of the images that are flattened for this linear layer alone, or None."""
        node: Any = self._calls(name)[0].args[0]
        if not self._flattens(node) or len(node.users) > 1:
            return None
        node = node.args[0]
        while not self._flattens(node) and (
            (node.op == "call_function" and len(node.all_input_nodes) == 1)
            or self.forms[node].keeps_rows
        ):
            (node,) = node.all_input_nodes
        layer = self._layer(node)
        return layer.out_channels if isinstance(layer, nn.Conv2d) else None

    def _absorb(self, node: fx.Node) -> None:
        """Record the nodes behind a layer that its form computes too: see `layers.KINDS`."""
        found: set[str] = set()
        windows: Windows | None = None
        before = node
        for behind in only_readers(node):
            kind = self._kind(behind)
            if kind not in self.forms[node].absorbs or behind in self.absorbed:
                break
            if kind == "add":
                other = self._added(behind, before)
                if other is None or found or len(self._calls(str(node.target))) > 1:
                    break
                self.added[node] = other
            elif kind == "dropout":
                if "pool" not in found or node in self.drops:
                    break
                self.drops[node] = str(behind.target)
            elif (
                kind in found
                or node in self.drops
                or (kind != "pool" and {"relu", "relu6"} & found)
            ):
                break
            assert kind is not None
            found.add(kind)
            windows = windows or self._windows(behind)
            self.absorbed[behind] = node
            self.ends[node] = before = behind
        relu = bool({"relu", "relu6"} & found)
        self.epilogues[node] = Epilogue(None, relu, 6.0 * ("relu6" in found), windows)

    def _kind(self, node: fx.Node) -> str | None:
        """The kind of epilogue operation that this node is, or None."""
        layer = self._layer(node)
        if type(layer) is nn.ReLU or node.target in (F.relu, torch.relu):
            return "relu"
        if type(layer) is nn.ReLU6 or node.target is F.relu6:
            return "relu6"
        if isinstance(layer, KeyedDropout) and not layer.channels:
            return "dropout"
        if node.target in ADDITIONS:
            return "add"
        return None if self._windows(node) is None else "pool"

    def _mask(self, node: fx.Node, key: Tensor, calls: Counter[str]) -> KeyedMask | None:
        """The mask of the dropout behind a layer, for this call; it counts the call."""
        name = self.drops[node]
        layer, call = self.layers[name], calls[name]
        calls[name] += 1
        assert isinstance(layer, KeyedDropout)
        return mask_of(layer, key, call)

    def _windows(self, node: fx.Node) -> Windows | None:
        layer = self._layer(node)
        return windows_of(layer) if isinstance(layer, nn.MaxPool2d) else None

    def _added(self, node: fx.Node, to: fx.Node) -> fx.Node | None:
        """The other operand of this addition, or None if it does not add two results."""
        others = [one for one in node.args if isinstance(one, fx.Node) and one is not to]
        return others[0] if len(others) == 1 and len(node.args) == 2 else None

    def _gives_rows(self, node: fx.Node) -> bool:
        if node.op == "call_method" or self._flattens(node):
            return True
        keeps = node.op == "call_function" or self.forms[node].keeps_rows
        return keeps and all(one in self.rows for one in node.all_input_nodes)

    def _flattens(self, node: fx.Node) -> bool:
        layer = self._layer(node)
        return node.target is torch.flatten or (isinstance(layer, nn.Flatten) and is_whole(layer))

    def _is_by_pixel(self, node: fx.Node, x: Activations, tensors: Tree) -> bool:
        """Whether these images are flattened pixel by pixel, as they are stored in memory.

        `Factors` of the next layer decide for themselves. Otherwise either the images or the matrix
        that multiplies them must be copied: without gradients, the smaller of the two is.
        """
        if len(node.users) != 1:
            return False
        (user,) = node.users
        weight = tensors.get(f"{user.target}.weight")
        if isinstance(weight, Factors):
            return weight.by_pixel
        is_linear = isinstance(self._layer(user), nn.Linear)
        if weight is None or not (is_linear and x.is_images) or torch.is_grad_enabled():
            return False
        num_images, num_outs = len(x.tensor) // x.clients, weight.shape[1]
        return x.tensor.shape[2:].numel() > 1 and num_images > num_outs

    def _own(self, name: str, tensors: Tree) -> Tree:
        layer = self.layers[name]
        names = [f"{name}.{key}" for key in (*layer._parameters, *layer._buffers)]
        return {full: tensors[full] for full in names if full in tensors}

    def _calls(self, name: str) -> list[fx.Node]:
        return [n for n in self.nodes if n.op == "call_module" and n.target == name]

    def _layer(self, node: fx.Node) -> nn.Module | None:
        return self.layers[str(node.target)] if node.op == "call_module" else None


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return not any(True for _ in m.children())


def read_module(module: nn.Module) -> StackedModule | None:
    """The module as a graph of layers, or None if its forward pass contains anything else."""
    if len(list(module.named_parameters(remove_duplicate=False))) > len(list(module.parameters())):
        return None  # weights shared by layers have only one name
    try:
        graph = _Tracer().trace(module)
    except Exception:  # a user's forward pass may raise anything when it is traced
        return None
    return StackedModule(module, graph) if all(map(_is_readable, graph.nodes)) else None


def only_readers(node: fx.Node) -> Iterator[fx.Node]:
    """The chain of nodes behind this one, as long as each result has exactly one reader."""
    while len(node.users) == 1:
        (node,) = node.users
        yield node


def _is_readable(node: fx.Node) -> bool:
    if node.op == "call_module":
        return len(node.args) == 1 and not node.kwargs
    if node.op == "call_function":
        if node.target is torch.flatten:
            return tuple(node.args[1:]) == (1,) and not node.kwargs
        # F.relu and F.relu6 are supported with inplace=False only.
        return node.target in PLAIN_FUNCTIONS and node.kwargs in ({}, {"inplace": False})
    if node.op == "call_method":  # the mean over all pixels of an image
        over = node.args[1] if len(node.args) == 2 and not node.kwargs else None
        return node.target == "mean" and over in ((2, 3), [2, 3], (-2, -1), [-2, -1])
    return node.op in ("placeholder", "output")


def _mean_of_channels(x: Activations) -> Activations:
    return Activations(x.by_client().mean((-2, -1)), x.clients, False)


def _function(function: Any, arguments: tuple[Any, ...]) -> Activations:
    first = next(a for a in arguments if isinstance(a, Activations))
    if function is operator.iadd:  # in place would overwrite what another branch reads
        function = operator.add
    tensors = [a.tensor if isinstance(a, Activations) else a for a in arguments]
    call: Callable[..., Tensor] = function
    return Activations(call(*tensors), first.clients, first.is_images)
