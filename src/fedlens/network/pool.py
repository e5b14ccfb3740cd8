"""Average pooling to a fixed size with a deterministic gradient; settings of max-pooling."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class AdaptivePool(nn.Module):
    """`nn.AdaptiveAvgPool2d` as two matrix products: its own gradient may vary on a GPU."""

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


class Windows(NamedTuple):
    """Windows of 2 x 2 that do not overlap, for max-pooling. Padding is never the maximum.

    Window (i, j) begins at position (2 * i - top, 2 * j - left).
    """

    top: int = 0  # rows of padding above and below, 0 or 1
    left: int = 0  # columns of padding on the left and right, 0 or 1

    def maxima(self, x: Tensor) -> Tensor:
        """The maximum of each window of images [N, channels, H, W], by PyTorch."""
        return F.max_pool2d(x, 2, padding=self)

    def number(self, rows: int, columns: int) -> tuple[int, int]:
        """The number of windows, down and across, over this many rows and columns."""
        return (rows + 2 * self.top) // 2, (columns + 2 * self.left) // 2


def _means(size: int, bins: int, like: Tensor) -> Tensor:  # [bins, size]
    """A matrix that averages: bin i of `bins` covers i / bins to (i + 1) / bins of `size`."""
    first = torch.arange(bins, device=like.device)[:, None] * size
    pixel = torch.arange(size, device=like.device)
    inside = (pixel >= first // bins) & (pixel < (first + size + bins - 1) // bins)
    weight = inside.to(like.dtype)
    return weight / weight.sum(1, keepdim=True)


def windows_of(pool: nn.MaxPool2d) -> Windows | None:
    """The windows of a max-pooling layer if they are 2 x 2 and do not overlap, else None."""
    plain = not (pool.ceil_mode or pool.return_indices)
    settings = (pool.kernel_size, pool.stride, pool.dilation)
    if plain and [pair(s) for s in settings] == [(2, 2), (2, 2), (1, 1)]:
        return Windows(*pair(pool.padding))
    return None


def pair(setting: int | tuple[int, ...]) -> tuple[int, ...]:
    """A setting as (rows, columns); a single number applies to both."""
    return (setting, setting) if isinstance(setting, int) else tuple(setting)
