"""Operations inside the normalisation kernels: weight and bias, an addition, and a ReLU."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor


class Follows(NamedTuple):
    """The operations behind a normalisation; kernels are compiled for each combination."""

    weight: bool  # whether there is a weight and a bias
    around: bool  # whether a skip connection is added
    relu: bool
    limit: float  # upper limit of the ReLU, or 0 for none


@triton.jit
def affine(weight, bias, entry, here, f: tl.constexpr):
    """The weight and the bias of channels; 1 and 0 if there are none."""
    w = tl.where(here, 1.0, 0.0)
    b = tl.where(here, 0.0, 0.0)
    if f.weight:
        w = tl.load(weight + entry, mask=here, other=0.0).to(tl.float32)
        b = tl.load(bias + entry, mask=here, other=0.0).to(tl.float32)
    return w, b


@triton.jit
def before_relu(normal, w, b, around, entry, there, f: tl.constexpr):
    """z = normal * w + b + around, for a tile [pixels, channels]."""
    z = normal * w[None, :] + b[None, :]
    if f.around:
        z += tl.load(around + entry, mask=there, other=0.0).to(tl.float32)
    return z


@triton.jit
def through_relu(z, f: tl.constexpr):
    if f.relu:
        z = tl.maximum(z, 0.0, propagate_nan=tl.PropagateNan.ALL)
    if f.limit > 0:
        z = tl.minimum(z, f.limit, propagate_nan=tl.PropagateNan.ALL)
    return z


@triton.jit
def back_through_relu(grad, z, f: tl.constexpr):
    if f.relu:
        grad = tl.where(z > 0, grad, 0.0)
    if f.limit > 0:
        grad = tl.where(z < f.limit, grad, 0.0)
    return grad


def or_any(x: Tensor, *tensors: Tensor | None) -> tuple[Tensor, ...]:
    """The tensors, with x in place of None: a kernel argument that is never read."""
    return tuple(x if t is None else t for t in tensors)
