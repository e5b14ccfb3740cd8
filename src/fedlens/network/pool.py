"""Pooling: to a fixed size, with a gradient that is the same every time; settings of PyTorch's."""

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
    pixel = torch.arange(size, device=like.device)
    inside = (pixel >= first // bins) & (pixel < (first + size + bins - 1) // bins)
    weight = inside.to(like.dtype)
    return weight / weight.sum(1, keepdim=True)


def is_two_by_two(pool: nn.MaxPool2d) -> bool:
    """Whether it is the maximum of windows of 2 x 2 that do not overlap, and nothing else."""
    plain = not (pool.ceil_mode or pool.return_indices)
    settings = (pool.kernel_size, pool.stride, pool.padding, pool.dilation)
    return plain and [pair(s) for s in settings] == [(2, 2), (2, 2), (0, 0), (1, 1)]


def pair(setting: int | tuple[int, ...]) -> tuple[int, ...]:
    """A setting of rows and of columns, where one number stands for both."""
    return (setting, setting) if isinstance(setting, int) else tuple(setting)
