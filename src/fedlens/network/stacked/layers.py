"""Each known kind of layer for C clients at once; any other is mapped over them by vmap."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, vmap

from fedlens.core import Tree
from fedlens.network.factors import Factors
from fedlens.network.layers import KeyedDropout, MaskedBatchNorm
from fedlens.network.ops import convolve, dropout, factored_linear, linear
from fedlens.network.pool import AdaptivePool
from fedlens.network.stacked.products import Padding

POOLS = (nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, AdaptivePool)
PLAIN = (
    *POOLS,
    nn.ReLU,
    nn.ReLU6,
    nn.Tanh,
    nn.Sigmoid,
    nn.SiLU,
    nn.GELU,
    nn.Identity,
)  # they treat every channel, or every number, alike


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

    def now(self, tensor: Tensor) -> Activations:
        """The same clients' after a layer that keeps images images."""
        return Activations(tensor, self.clients, self.is_images)


class Given(NamedTuple):
    """What a layer gets besides its input."""

    name: str  # the layer's
    held: Tree  # [C, ...] its parameters and buffers, as the run keeps them, by full name
    to_compute: Callable[[Tree], Tree]  # brings them to the dtype to multiply in
    key: Tensor  # [C]
    mask: Tensor  # [C, B]
    call: int  # how often the layer was used before in this forward pass

    @property
    def own(self) -> Tree:
        return {name.removeprefix(f"{self.name}."): t for name, t in self.held.items()}

    def cast(self) -> Given:
        return self._replace(held=self.to_compute(self.held))


@dataclass(frozen=True)
class Follow:
    """What comes after a convolution or a linear layer, and is done in the same breath."""

    relu: bool = False
    pool: bool = False  # the maximum of 2 x 2

    def __call__(self, tensor: Tensor) -> Tensor:
        tensor = F.relu(tensor) if self.relu else tensor
        return F.max_pool2d(tensor, 2) if self.pool else tensor


def stacked(layer: nn.Module, x: Activations, given: Given, follow: Follow) -> Activations:
    if isinstance(layer, nn.Conv2d) and x.is_images and layer.padding_mode == "zeros":
        return x.now(_convolution(layer, x, given, follow))
    if isinstance(layer, nn.Linear) and not x.is_images and x.tensor.ndim == 3:
        weight, bias = given.own["weight"], given.own.get("bias")
        if isinstance(weight, Factors):
            return x.now(factored_linear(x.tensor, weight, bias, relu=follow.relu))
        return x.now(linear(x.tensor, weight, bias, relu=follow.relu))
    if isinstance(layer, nn.GroupNorm) and x.is_images:
        return x.now(_group_norm(layer, x, given.cast().own))
    if getattr(layer, "inplace", False):  # what it writes over, a gradient may still need
        x = x.now(x.tensor.clone())
    if isinstance(layer, PLAIN) and (x.is_images or not isinstance(layer, POOLS)):
        return x.now(layer(x.tensor))
    if isinstance(layer, KeyedDropout):
        return _dropout(layer, x, given) if layer.training else x
    tensors = given.cast().own | (
        {"mask": given.mask} if isinstance(layer, MaskedBatchNorm) else {}
    )
    mapped = vmap(lambda tree, rows: functional_call(layer, tree, (rows,)))
    y = Activations.of(mapped(tensors, x.by_client()))
    return y.now(follow(y.tensor))


def flattened(x: Activations, *, by_pixel: bool = False) -> Activations:
    """Rows, channel by channel as PyTorch has it, or pixel by pixel, as they lie in memory."""
    rows = x.by_client()
    return Activations((rows.movedim(2, -1) if by_pixel else rows).flatten(2), x.clients, False)


def averaged(x: Activations) -> Activations:
    """The mean of every channel."""
    return Activations(x.by_client().mean((-2, -1)), x.clients, False)


def _convolution(layer: nn.Conv2d, x: Activations, given: Given, follow: Follow) -> Tensor:
    """Every client's images under its own kernels."""
    sides = _sides(layer)
    # In float32 on a GPU the patches of large batches would fill its memory.
    in_patches = not (x.tensor.is_cuda and x.tensor.dtype is torch.float32)
    if layer.groups == 1 and layer.dilation == (1, 1) and in_patches:
        weight, bias = given.own["weight"], given.own.get("bias")
        down, right = layer.stride
        if weight.shape[3:] == (1, 1) and not any(sides):  # a linear layer over pixels
            pixels = x.tensor[:, :, ::down, ::right].permute(0, 2, 3, 1)
            rows = pixels.reshape(x.clients, -1, pixels.shape[3])
            y = linear(rows, weight.flatten(2), bias, relu=follow.relu)
            y = y.view(*pixels.shape[:3], -1).permute(0, 3, 1, 2)
            return Follow(pool=follow.pool)(y)
        return convolve(
            x.tensor, weight, bias, sides, (down, right), relu=follow.relu, pool=follow.pool
        )
    # Any other: clients as groups of channels.
    images = F.pad(x.by_client().transpose(0, 1).flatten(1, 2), sides)  # [B, C * channels, H, W]
    geometry: Any = layer.stride, 0, layer.dilation, x.clients * layer.groups
    own = given.cast().own
    bias = own["bias"].flatten() if "bias" in own else None
    y = F.conv2d(images, own["weight"].flatten(0, 1), bias, *geometry)
    y = y.view(len(y), x.clients, -1, *y.shape[2:]).transpose(0, 1).flatten(0, 1)
    return follow(y.contiguous(memory_format=torch.channels_last))


def _sides(layer: nn.Conv2d) -> Padding:
    if layer.padding == "same":
        whole = [d * (k - 1) for d, k in zip(layer.dilation, layer.kernel_size, strict=True)]
        (top, left), (rows, columns) = (w // 2 for w in whole), whole
        return left, columns - left, top, rows - top
    rows, columns = (0, 0) if isinstance(layer.padding, str) else layer.padding
    return columns, columns, rows, rows


def _group_norm(layer: nn.GroupNorm, x: Activations, own: Tree) -> Tensor:
    y = F.group_norm(x.tensor, layer.num_groups, eps=layer.eps)
    if "weight" in own:
        scale, shift = (own[key][:, None, :, None, None] for key in ("weight", "bias"))
        y = (x.now(y).by_client() * scale + shift).flatten(0, 1)
    return y.contiguous(memory_format=torch.channels_last)


def _dropout(layer: KeyedDropout, x: Activations, given: Given) -> Activations:
    y = dropout(
        x.by_client(), given.key, layer.p, layer.layer, call=given.call, channels=layer.channels
    )
    return Activations.of(y)
