"""The Triton forms of normalisation, with gradients. `network/ops.py` decides when they run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedlens.network.kernels import batch_norm as batch
from fedlens.network.kernels import group_norm as group
from fedlens.network.kernels.follows import Follows
from fedlens.network.layers import Running
from fedlens.network.stacked.epilogue import Epilogue
from fedlens.network.stacked.products import apply


def group_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    clients: int,
    groups: int,
    eps: float,
    epilogue: Epilogue,
) -> Tensor:
    """`ops.group_norm`; the gradients of weights have the dtype of the weights."""
    forward = partial(group.group_norm, clients=clients, groups=groups, eps=eps)
    backward = partial(group.group_norm_gradient, clients=clients, groups=groups)
    return _norm(x, weight, bias, epilogue, forward, backward)


def batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mask: Tensor,
    eps: float,
    running: Running | None,
    epilogue: Epilogue,
) -> Tensor:
    """`ops.batch_norm`; the gradients of weights have the dtype of the weights."""
    mask = mask.contiguous()
    forward = partial(batch.batch_norm, mask=mask, eps=eps, running=running)
    backward = partial(batch.batch_norm_gradient, mask=mask)
    return _norm(x, weight, bias, epilogue, forward, backward)


def _norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    epilogue: Epilogue,
    forward: Callable[..., tuple[Tensor, Tensor]],
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]],
) -> Tensor:
    around = epilogue.around
    follows = Follows(weight is not None, around is not None, epilogue.relu, epilogue.limit)
    return apply(Norm, x, weight, bias, around, follows, forward, backward)


def _last(images: Tensor) -> Tensor:
    """Images as [N, H, W, channels], contiguous."""
    return images.permute(0, 2, 3, 1).contiguous()


class Norm(torch.autograd.Function):
    """A normalisation of C clients, then an optional skip connection, and ReLU or ReLU6."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        around: Tensor | None,
        follows: Follows,
        forward: Callable[..., tuple[Tensor, Tensor]],
        backward: Callable[..., tuple[Tensor, Tensor, Tensor]],
    ) -> Tensor:
        images = _last(x)
        around = None if around is None else _last(around)
        if weight is not None and bias is not None:
            weight, bias = weight.contiguous(), bias.contiguous()
        y, stats = forward(images, weight, bias, around, follows=follows)
        ctx.save_for_backward(images, weight, bias, around if follows.relu else None, stats)
        ctx.follows, ctx.backward_of = follows, backward
        return y.permute(0, 3, 1, 2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        images, weight, bias, around, stats = ctx.saved_tensors
        # Without a ReLU, the backward pass ignores the skip connection.
        follows = ctx.follows if ctx.follows.relu else ctx.follows._replace(around=False)
        dx, daround, sums = ctx.backward_of(
            _last(grads[0]), images, weight, bias, around, stats=stats, follows=follows
        )
        dw, db = (None, None) if weight is None else sums.to(weight.dtype)
        grad = daround.permute(0, 3, 1, 2) if ctx.follows.around else None
        return dx.permute(0, 3, 1, 2), dw, db, grad, None, None, None
