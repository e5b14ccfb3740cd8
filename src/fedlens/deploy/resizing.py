"""Images of any size at the size of a model, as Pillow resizes files, in operations of torch alone.

The sizes of the images are never looked at by Python, so that an exported graph resizes others,
too.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fedlens.core.federation import Fit


def resized(images: Tensor, size: tuple[int, int], fit: Fit) -> Tensor:  # [N, channels, *size]
    """Images [N, channels, any H, any W] of floats at this height and width, up to rounding."""
    if fit == "stretch":
        return F.interpolate(images, size, mode="bilinear", antialias=True)
    sides = [torch.ones(n, device=images.device).sum() for n in images.shape[2:]]
    ratios = torch.stack([side / to for side, to in zip(sides, size, strict=True)])
    scale = ratios.max() if fit == "letterbox" else ratios.min()
    rows, columns = (
        _weights(images.shape[axis + 2], sides[axis], size[axis], scale, fit) for axis in (0, 1)
    )
    return rows @ images @ columns.T


def _weights(num: int, side: Tensor, to: int, scale: Tensor, fit: Fit) -> Tensor:  # [to, side]
    """How much each of `num` pixels counts in each of `to`, which are `scale` apart.

    Each is a triangle around its middle, as wide as two steps of the coarser of both grids.
    """
    place = torch.arange(to, device=side.device) + 0.5
    inside = torch.ones_like(place)
    if fit == "letterbox":
        inner = (side / scale).round().clamp(min=1)
        place = place - ((to - inner) / 2).floor()
        inside = ((place > 0) & (place < inner)).to(place.dtype)
        middle, step = place * side / inner, side / inner
    else:
        middle, step = (side - to * scale) / 2 + place * scale, scale
    pixel = torch.arange(num, device=side.device) + 0.5
    found = (1 - (pixel - middle[:, None]).abs() / step.clamp(min=1)).clamp(min=0)
    return found * (inside / found.sum(1).clamp(min=1e-6))[:, None]
