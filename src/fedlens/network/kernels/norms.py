"""The Triton forms of normalisation, with gradients. `network/ops.py` decides when they run."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedlens.network.kernels import batch_norm as batch
from fedlens.network.kernels import group_norm as group
from fedlens.network.kernels.follows import Follows
from fedlens.network.layers import Running
from fedlens.network.stacked.epilogue import Epilogue


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
    given = weight, bias, epilogue.around
    y: Tensor = GroupNorm.apply(x, *given, clients, groups, eps, _follows(weight, epilogue))  # type: ignore[no-untyped-call]
    return y


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
    given = weight, bias, epilogue.around
    y: Tensor = BatchNorm.apply(x, *given, mask, eps, running, _follows(weight, epilogue))  # type: ignore[no-untyped-call]
    return y


def _follows(weight: Tensor | None, epilogue: Epilogue) -> Follows:
    around = epilogue.around is not None
    return Follows(weight is not None, around, epilogue.relu, epilogue.limit)


def _last(images: Tensor) -> Tensor:
    """Images as [N, H, W, channels], contiguous."""
    return images.permute(0, 2, 3, 1).contiguous()


class GroupNorm(torch.autograd.Function):
    """Group normalisation of C clients, then an optional skip connection, and ReLU or ReLU6."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        around: Tensor | None,
        clients: int,
        groups: int,
        eps: float,
        follows: Follows,
    ) -> Tensor:
        images = _last(x)
        around = None if around is None else _last(around)
        if weight is not None and bias is not None:
            weight, bias = weight.contiguous(), bias.contiguous()
        y, stats = group.group_norm(images, weight, bias, around, clients, groups, eps, follows)
        ctx.save_for_backward(images, weight, bias, around if follows.relu else None, stats)
        ctx.clients, ctx.groups, ctx.follows = clients, groups, follows
        return y.permute(0, 3, 1, 2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        images, weight, bias, around, stats = ctx.saved_tensors
        given = images, weight, bias, around, stats, ctx.clients, ctx.groups
        dx, daround, sums = group.group_norm_gradient(
            _last(grads[0]), *given, _backwards(ctx.follows)
        )
        dw, db = (None, None) if weight is None else sums.to(weight.dtype)
        grad = daround.permute(0, 3, 1, 2) if ctx.follows.around else None
        return dx.permute(0, 3, 1, 2), dw, db, grad, None, None, None, None


class BatchNorm(torch.autograd.Function):
    """Batch normalisation of C clients, then an optional skip connection, and ReLU or ReLU6."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        around: Tensor | None,
        mask: Tensor,
        eps: float,
        running: Running | None,
        follows: Follows,
    ) -> Tensor:
        images, mask = _last(x), mask.contiguous()
        around = None if around is None else _last(around)
        if weight is not None and bias is not None:
            weight, bias = weight.contiguous(), bias.contiguous()
        y, stats = batch.batch_norm(images, weight, bias, around, mask, eps, running, follows)
        ctx.save_for_backward(images, weight, bias, around if follows.relu else None, mask, stats)
        ctx.follows = follows
        return y.permute(0, 3, 1, 2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        images, weight, bias, around, mask, stats = ctx.saved_tensors
        given = images, weight, bias, around, mask, stats
        dx, daround, sums = batch.batch_norm_gradient(
            _last(grads[0]), *given, _backwards(ctx.follows)
        )
        dw, db = (None, None) if weight is None else sums.to(weight.dtype)
        grad = daround.permute(0, 3, 1, 2) if ctx.follows.around else None
        return dx.permute(0, 3, 1, 2), dw, db, grad, None, None, None, None


def _backwards(follows: Follows) -> Follows:
    """`follows` for the backward pass, which without a ReLU ignores the skip connection."""
    return follows if follows.relu else follows._replace(around=False)
