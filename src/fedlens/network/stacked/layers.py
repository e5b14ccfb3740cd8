"""How each known type of layer runs for C clients at once, in one table: FORMS.

To add a type: write its function, and add a row to the table and an example to
tests/network/test_stacked_layers.py. A layer of any other type is mapped over the clients by vmap.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
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
from fedlens.network.pool import AdaptivePool
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
