"""How each known type of layer runs for C clients at once, in one table: FORMS.

To add a type: write its function, and add a row to the table and an example to
tests/network/test_stacked_layers.py. A layer of any other type is mapped over the clients by vmap.

A module's forward pass, traced once and run for C clients at once.

Convolutions and linear layers become batched products, one matrix a client, together with the ReLU
and the pooling that follow them; normalisation includes the addition and the ReLU behind it. The
images of all clients are stored one after another, so that pooling and the like run on one large
batch. A module whose forward pass cannot be traced does not run here: `read_module` returns None.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.func import functional_call, vmap

from fedlens.core import Tree
from fedlens.network.layers import KeyedDropout, MaskedBatchNorm, Running
from fedlens.network.ops import (
    batch_norm,
    convolve,
    convolve_channels,
    dropout,
    dropped_images,
    factored_linear,
    group_norm,
    linear,
)
from fedlens.network.pool import AdaptivePool, Windows, windows_of
from fedlens.network.stacked.epilogue import Epilogue, KeyedMask
from fedlens.network.stacked.products import Factors, Padding, grouped_convolve, strided_pixels


@dataclass(frozen=True)
class Activations:
    """A layer's result for C clients: images [C * B, channels, H, W], or rows [C, B, features].

    Images are stored channels last: the next layer reads a convolution's result without a copy.
    """

    tensor: Tensor
    clients: int
    is_images: bool
    channels: int | None = None  # of the images, if rows are images flattened pixel by pixel

    @property
    def is_rows(self) -> bool:
        return not self.is_images and self.tensor.ndim == 3

    def by_client(self) -> Tensor:  # [C, B, ...]
        if not self.is_images:
            return self.tensor
        return self.tensor.view(self.clients, -1, *self.tensor.shape[1:])

    @classmethod
    def of(cls, tensor: Tensor) -> Activations:
        """Activations from a tensor [C, B, ...]."""
        if tensor.ndim == 5:
            images = tensor.flatten(0, 1).contiguous(memory_format=torch.channels_last)
            return cls(images, len(tensor), True)
        return cls(tensor, len(tensor), False)

    def now(self, tensor: Tensor) -> Activations:
        """The result of a layer that turns images into images and rows into rows."""
        return Activations(tensor, self.clients, self.is_images)


class LayerInput(NamedTuple):
    """The inputs of a layer besides the activations."""

    name: str  # of the layer
    held: Tree  # [C, ...] its parameters and buffers in their stored dtype, by full name
    to_compute: Callable[[Tree], Tree]  # casts them to the dtype of multiplications
    key: Tensor  # [C]
    mask: Tensor  # [C, B]
    call: int = 0  # earlier calls of the layer in this forward pass
    epilogue: Epilogue = Epilogue()
    by_pixel: bool = False  # whether to flatten images pixel by pixel

    @property
    def own(self) -> Tree:
        return {name.removeprefix(f"{self.name}."): t for name, t in self.held.items()}

    def cast(self) -> LayerInput:
        return self._replace(held=self.to_compute(self.held))


KINDS = ("add", "relu", "relu6", "pool", "dropout")
"""The kinds of following operations that a layer may compute together with itself."""


def _always(layer: nn.Module, x: Activations) -> bool:
    return True


@dataclass(frozen=True)
class Form:
    """How a type of layer runs for C clients. If `applies` is False, the layer is mapped."""

    run: Callable[[Any, Activations, LayerInput], Activations]
    applies: Callable[[Any, Activations], bool] = _always
    absorbs: frozenset[str] = frozenset()  # of KINDS: following operations that `run` computes too
    keeps_rows: bool = False  # rows stay rows, images keep their channels

    def __call__(self, layer: nn.Module, x: Activations, given: LayerInput) -> Activations:
        run = self.run if self.applies(layer, x) else mapped
        return run(layer, x, given)


def mapped(layer: nn.Module, x: Activations, given: LayerInput) -> Activations:
    """Run any layer, mapped over the clients by vmap."""
    return _mapped(layer, _spared(layer, x), given, given.cast().own)


def _mapped(layer: nn.Module, x: Activations, given: LayerInput, tensors: Tree) -> Activations:
    each = vmap(lambda tree, rows: functional_call(layer, tree, (rows,)))
    y = Activations.of(each(tensors, x.by_client()))
    return y.now(followed(y.tensor, given.epilogue))


def followed(y: Tensor, epilogue: Epilogue) -> Tensor:
    """A layer's result after its epilogue, computed by separate operations."""
    y = epilogue(y)
    return y if epilogue.mask is None else dropped_images(y, epilogue.mask)


def _spared(layer: nn.Module, x: Activations) -> Activations:
    """x, or a copy of it for a layer that works in place: a gradient may still need x."""
    return x.now(x.tensor.clone()) if getattr(layer, "inplace", False) else x


def _elementwise(layer: nn.Module, x: Activations, given: LayerInput) -> Activations:
    """A layer without parameters that treats all elements, or all channels, alike."""
    return x.now(layer(_spared(layer, x).tensor))


def _masked_norm(layer: MaskedBatchNorm, x: Activations, given: LayerInput) -> Activations:
    tensors = given.cast().own | {"mask": given.mask}
    if not layer.training:
        # Client by client: vmap does not support batch normalisation of channels-last images.
        each = ({name: t[i] for name, t in tensors.items()} for i in range(x.clients))
        done = [
            functional_call(layer, one, (a,)) for one, a in zip(each, x.by_client(), strict=True)
        ]
        y = Activations.of(torch.stack(done))
        return y.now(given.epilogue(y.tensor))
    normal = _normalised_batches(layer, x, given)
    return x.now(normal) if normal is not None else _mapped(layer, x, given, tensors)


def _normalised_batches(layer: MaskedBatchNorm, x: Activations, given: LayerInput) -> Tensor | None:
    """The result of one kernel for all clients, or None if no kernel supports the layer."""
    if not x.is_images or layer.momentum is None:
        return None
    own, running = given.own, None
    if layer.track_running_stats:
        seen = own["num_batches_tracked"]
        running = Running(own["running_mean"], own["running_var"], seen, layer.momentum)
    settings = given.mask, layer.eps, running, given.epilogue
    return batch_norm(x.tensor, own.get("weight"), own.get("bias"), *settings)


def _dropout(layer: KeyedDropout, x: Activations, given: LayerInput) -> Activations:
    mask = mask_of(layer, given.key, given.call)
    if mask is None:
        return x
    return Activations.of(dropout(x.by_client(), mask, channels=layer.channels))


def mask_of(layer: KeyedDropout, keys: Tensor, call: int) -> KeyedMask | None:
    """The dropout mask of a layer at this call; None in evaluation."""
    return KeyedMask(keys, layer.p, layer.layer, call) if layer.training else None


def _group_norm(layer: nn.GroupNorm, x: Activations, given: LayerInput) -> Activations:
    weight, bias = given.own.get("weight"), given.own.get("bias")
    settings = x.clients, layer.num_groups, layer.eps, given.epilogue
    return x.now(group_norm(x.tensor, weight, bias, *settings))


def flatten(x: Activations, *, by_pixel: bool) -> Activations:
    """Images as rows: channel by channel like PyTorch, or pixel by pixel, as stored in memory."""
    rows = x.by_client()
    if not by_pixel:
        return Activations(rows.flatten(2), x.clients, False)
    return Activations(rows.movedim(2, -1).flatten(2), x.clients, False, rows.shape[2])


def _flatten(layer: nn.Flatten, x: Activations, given: LayerInput) -> Activations:
    return flatten(x, by_pixel=given.by_pixel)


def is_whole(layer: nn.Flatten, x: Activations | None = None) -> bool:
    """Whether the layer flattens each example to one row."""
    return (layer.start_dim, layer.end_dim) == (1, -1)


def _linear(layer: nn.Linear, x: Activations, given: LayerInput) -> Activations:
    weight, bias, relu = given.own["weight"], given.own.get("bias"), given.epilogue.relu
    if isinstance(weight, Factors):
        return x.now(factored_linear(x.tensor, weight, bias, relu=relu))
    if x.channels is not None:
        weight = weight.view(*weight.shape[:2], x.channels, -1).transpose(2, 3).flatten(2)
    return x.now(linear(x.tensor, weight, bias, relu=relu))


def _convolution(layer: nn.Conv2d, x: Activations, given: LayerInput) -> Activations:
    """Convolve each client's images with its own kernels."""
    weight, bias, epilogue = given.own["weight"], given.own.get("bias"), given.epilogue
    sides, (down, right) = sides_of(layer), layer.stride
    if layer.groups == layer.in_channels == layer.out_channels and layer.dilation == (1, 1):
        y = convolve_channels(x.tensor, weight, bias, sides, (down, right))
        return x.now(followed(y, epilogue))
    # In float32 on a GPU, the patches of large batches would take too much memory.
    in_patches = not (x.tensor.is_cuda and x.tensor.dtype is torch.float32)
    if not (layer.groups == 1 and layer.dilation == (1, 1) and in_patches):
        geometry: Any = layer.stride, layer.dilation, layer.groups
        y = grouped_convolve(x.tensor, weight, bias, sides, *geometry)
        return x.now(followed(y, epilogue))
    if weight.shape[3:] == (1, 1) and not any(sides):  # a linear layer on pixels
        pixels = strided_pixels(x.tensor, (down, right))
        rows = pixels.reshape(x.clients, -1, pixels.shape[3])
        y = linear(rows, weight.flatten(2), bias, relu=epilogue.relu)
        y = y.view(*pixels.shape[:3], -1).permute(0, 3, 1, 2)
        return x.now(followed(y, replace(epilogue, relu=False)))
    operands = x.tensor, weight, bias, sides, (down, right)
    relu, pool, mask = epilogue.relu, epilogue.pool, epilogue.mask
    return x.now(convolve(*operands, relu=relu, pool=pool, mask=mask))


def sides_of(layer: nn.Conv2d) -> Padding:
    if layer.padding == "same":
        whole = [d * (k - 1) for d, k in zip(layer.dilation, layer.kernel_size, strict=True)]
        (top, left), (rows, columns) = (w // 2 for w in whole), whole
        return left, columns - left, top, rows - top
    rows, columns = (0, 0) if isinstance(layer.padding, str) else layer.padding
    return columns, columns, rows, rows


def _of_images(layer: nn.Module, x: Activations) -> bool:
    return x.is_images


def _of_rows(layer: nn.Module, x: Activations) -> bool:
    return x.is_rows


def _of_zero_padded_images(layer: nn.Conv2d, x: Activations) -> bool:
    return x.is_images and layer.padding_mode == "zeros"


_POOL = Form(_elementwise, _of_images, keeps_rows=True)
_ACTIVATION = Form(_elementwise, keeps_rows=True)

FORMS: dict[type[nn.Module], Form] = {
    nn.Conv2d: Form(
        _convolution, _of_zero_padded_images, absorbs=frozenset({"relu", "pool", "dropout"})
    ),
    nn.Linear: Form(_linear, _of_rows, absorbs=frozenset({"relu"}), keeps_rows=True),
    nn.Flatten: Form(_flatten, is_whole),
    # Normalisation keeps rows too, but a linear layer behind it must not be factored.
    nn.GroupNorm: Form(_group_norm, _of_images, absorbs=frozenset({"add", "relu", "relu6"})),
    MaskedBatchNorm: Form(_masked_norm, absorbs=frozenset({"add", "relu", "relu6"})),
    KeyedDropout: Form(_dropout, keeps_rows=True),
    nn.MaxPool2d: _POOL,
    nn.AvgPool2d: _POOL,
    nn.AdaptiveAvgPool2d: _POOL,
    AdaptivePool: _POOL,
    nn.ReLU: _ACTIVATION,
    nn.ReLU6: _ACTIVATION,
    nn.Tanh: _ACTIVATION,
    nn.Sigmoid: _ACTIVATION,
    nn.SiLU: _ACTIVATION,
    nn.GELU: _ACTIVATION,
    nn.Identity: _ACTIVATION,
}

MAPPED = Form(mapped)


def form_of(layer: nn.Module) -> Form:
    """The form of a layer's type or of its nearest base class, else MAPPED."""
    return next((FORMS[kind] for kind in type(layer).__mro__ if kind in FORMS), MAPPED)


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
