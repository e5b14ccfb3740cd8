"""Average pooling to a fixed size, with a gradient that is the same every time."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class AdaptivePool(nn.Module):
    """What `nn.AdaptiveAvgPool2d` gives, as two products: on a GPU its own gradient may vary."""

    def __init__(self, side: int) -> None:
        super().__init__()
        self.side = side

    def forward(self, x: Tensor) -> Tensor:  # [B, channels, H, W] -> [B, channels, side, side]
        height, width = x.shape[-2:]
        if height == width == self.side:
            return x
        return _means(height, self.side, x) @ x @ _means(width, self.side, x).T

    def extra_repr(self) -> str:
        return f"side={self.side}"


def _means(size: int, bins: int, like: Tensor) -> Tensor:  # [bins, size]
    """Rows that average: bin i of `bins` reaches from i / bins to (i + 1) / bins of `size`."""
    first = torch.arange(bins, device=like.device)[:, None] * size
    place = torch.arange(size, device=like.device)
    inside = (place >= first // bins) & (place < (first + size + bins - 1) // bins)
    weight = inside.to(like.dtype)
    return weight / weight.sum(1, keepdim=True)
