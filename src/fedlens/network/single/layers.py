"""Faster layers for one client at a time; tensor names and results stay the same.

Convolution, max-pooling and ReLU become one layer. ReLU and max-pooling commute,

    relu(max of a window) = max of relu of the window,

and the gradient goes to the same pixel. So pooling runs first, ReLU processes fewer pixels, and
the convolution's own result is not stored.

On the fast path a convolution uses fewer multiplications, see `winograd.py`. If a step is just
w -= lr * grad, a layer applies it in the backward pass, as soon as its gradient is known; a linear
layer does so by one product, and never stores its gradient.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from fedlens.network.layers import copied
from fedlens.network.pool import pair
from fedlens.network.single import winograd
from fedlens.network.stacked.layers import only_readers

aten = torch.ops.aten


def fuse(module: nn.Module, nodes: Sequence[fx.Node]) -> nn.Module:
    """A copy of `module`, whose forward pass is `nodes`, with fused and fast layers.

    A convolution is fused with a ReLU and, before or behind that, a max-pooling, if all are called
    once and have no hooks. If no layer can be replaced, it is the module itself.
    """
    calls = Counter(str(node.target) for node in nodes if node.op == "call_module")
    own = copied(module)
    once = {name: own.get_submodule(name) for name, count in calls.items() if count == 1}
    once = {n: m for n, m in once.items() if not (m._forward_hooks or m._forward_pre_hooks)}
    made: dict[str, nn.Module] = {}
    for node in nodes:
        name, layer = str(node.target), once.get(str(node.target))
        if type(layer) is nn.Linear:
            made[name] = Linear(layer)
        if type(layer) is not nn.Conv2d or layer.padding_mode != "zeros" or layer.padding == "same":
            continue
        behind: dict[type[nn.Module], str] = {}
        for reader in only_readers(node):
            kind = type(once.get(str(reader.target)))
            if kind not in (nn.ReLU, nn.MaxPool2d) or kind in behind:
                break
            behind[kind] = str(reader.target)
        pool: Any = once[behind[nn.MaxPool2d]] if nn.MaxPool2d in behind else None
        if nn.ReLU in behind and not getattr(pool, "return_indices", False):
            made |= {other: nn.Identity() for other in behind.values()}
            made[name] = FusedConvolution(layer, pool)
    for name, layer in made.items():
        own.set_submodule(name, layer)
    return own if made else module


@dataclass(frozen=True)
class FastPath:
    """Settings of the fast path, whose results are rounded differently."""

    lr: float | None = None  # of the step in the backward pass; None: return gradients


class Linear(nn.Module):
    """A linear layer that can update its weights in the backward pass."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.fast: FastPath | None = None

    def forward(self, x: Tensor) -> Tensor:
        lr = self.fast.lr if self.fast else None
        if lr is None or x.ndim != 2:
            return F.linear(x, self.weight, self.bias)
        apply: Any = _Linear.apply
        y: Tensor = apply(x, self.weight, self.bias, lr)
        return y


class _Linear(torch.autograd.Function):
    """A linear layer that updates its weights in the backward pass and returns no gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, lr: float) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        ctx.lr = lr
        return _times(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight, bias = ctx.saved_tensors
        (grad,) = grads
        with_images, with_weight, with_bias, _ = ctx.needs_input_grad
        dx = _times(grad, weight.T, None) if with_images else None
        if with_weight:
            weight.addmm_(grad.T, x, alpha=-ctx.lr)
        if with_bias:
            bias.add_(grad.sum(0), alpha=-ctx.lr)
        return dx, None, None, None


def _times(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x weight' + bias; if large, by oneDNN, which does not copy all weights for a few rows."""
    is_large = weight.numel() >= 2**18 and x.dtype is torch.float32 and x.device.type == "cpu"
    if not (is_large and _has_onednn()):
        return F.linear(x, weight, bias)
    y: Tensor = torch.ops.mkldnn._linear_pointwise(x.contiguous(), weight, bias, "none", [], "")
    return y


@cache
def _has_onednn() -> bool:
    """Whether oneDNN's products are available and fast (AVX-512)."""
    quick = torch.backends.cpu.get_cpu_capability() == "AVX512"
    return quick and hasattr(torch.ops.mkldnn, "_linear_pointwise")


class FusedConvolution(nn.Module):
    """A convolution, an optional max-pooling, and ReLU, in one layer."""

    def __init__(self, convolution: nn.Conv2d, pool: nn.MaxPool2d | None) -> None:
        super().__init__()
        self.weight, self.bias = convolution.weight, convolution.bias
        padding = (0, 0) if convolution.padding == "valid" else convolution.padding
        self.geometry = convolution.stride, padding, convolution.dilation, convolution.groups
        self.pool = pool and (
            *map(pair, (pool.kernel_size, pool.stride, pool.padding, pool.dilation)),
            pool.ceil_mode,
        )
        self.fast: FastPath | None = None

    def forward(self, x: Tensor) -> Tensor:
        apply: Any = _Fused.apply
        y: Tensor = apply(x, self.weight, self.bias, self.geometry, self.pool, self.fast)
        return y


class _Fused(torch.autograd.Function):
    """relu(pool(convolution + bias)); with an lr it takes its step and returns no gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        geometry: Any,
        pool: Any,
        fast: FastPath | None,
    ) -> Tensor:
        seen: tuple[Tensor, ...] = ()
        if fast and winograd.suits(x, weight, geometry):
            y, seen = winograd.convolve(x, weight, padding=geometry[1])
        else:
            y = torch.conv2d(x, weight, bias, *geometry)
        ctx.geometry, ctx.pool, ctx.shape = geometry, pool, y.shape
        ctx.lr = fast.lr if fast else None
        last = y.is_contiguous(memory_format=torch.channels_last)
        ctx.format = torch.channels_last if last else torch.contiguous_format
        winners = None
        if pool is not None:
            y, winners = aten.max_pool2d_with_indices(y, *pool)
        if seen and bias is not None:
            y.add_(bias[:, None, None])  # after pooling there are fewer pixels
        y.relu_()
        ctx.save_for_backward(x, weight, bias, y, winners, *seen)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight, bias, y, winners, *seen = ctx.saved_tensors
        (grad,) = grads
        with_images, with_weight, with_bias, *_ = ctx.needs_input_grad
        grad = aten.threshold_backward(grad, y, 0).contiguous(memory_format=ctx.format)
        # Pooling passes each gradient to one pixel: the sum is the same here, of fewer numbers.
        db = grad.sum((0, 2, 3)) if with_bias else None
        if winners is not None:
            # PyTorch only uses the shape of the pooling input.
            kind = {"dtype": grad.dtype, "device": grad.device, "memory_format": ctx.format}
            pooled = torch.empty(ctx.shape, **kind)
            grad = aten.max_pool2d_with_indices_backward(grad, pooled, *ctx.pool, winners)
        stride, padding, dilation, groups = ctx.geometry
        if seen:
            dx, dw = winograd.gradients(
                grad, x, winograd.Seen(*seen), weight, padding, first=not with_images
            )
        else:
            rest = stride, padding, dilation, False, (0, 0), groups
            dx, dw, _ = aten.convolution_backward(
                grad, x, weight, None, *rest, [with_images, with_weight, False]
            )
        if ctx.lr is None:
            return dx, dw, db, None, None, None
        if with_weight:
            weight.add_(dw, alpha=-ctx.lr)
        if with_bias:
            bias.add_(db, alpha=-ctx.lr)
        return dx, None, None, None, None, None


FastLayer = FusedConvolution | Linear  # the layers with a fast path


@contextmanager
def on_fast_path(layers: Sequence[FastLayer], path: FastPath | None) -> Iterator[None]:
    """A context in which these layers take this path."""
    for layer in layers:
        layer.fast = path
    try:
        yield
    finally:
        for layer in layers:
            layer.fast = None
