"""Bytes of images as the numbers that a model is given."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from fedlens.network.kernels.ops import has_kernels


def normalise(
    images: Tensor,
    mean: Sequence[float] | None,
    std: Sequence[float] | None,
    dtype: torch.dtype,
) -> Tensor:
    """Bytes as (x / 255 - mean) / std, channel by channel, in `dtype`; floats as they are.

    `images` is [..., channels, H, W]. Without a mean it is 0, without a std it is 1.
    """
    if images.is_floating_point():
        return images.to(dtype)
    channels = images.shape[-3]
    mean = tuple(mean) if mean is not None else (0.0,) * channels
    std = tuple(std) if std is not None else (1.0,) * channels
    if not len(mean) == len(std) == channels:
        raise ValueError(
            f"images of {channels} channels but {len(mean)} means and {len(std)} stds: "
            "give one for each channel"
        )
    wide = torch.promote_types(dtype, torch.float32)
    scale, shift = _line(mean, std, images.device, wide)
    if has_kernels(images) and images.dtype is torch.uint8:
        from fedlens.network.kernels import elementwise

        rows = images.flatten(0, -4)
        done = elementwise.normalise(rows, scale.flatten(), shift.flatten(), dtype)
        return done.view(*images.shape[:-3], *done.shape[1:])
    return images.to(wide).mul_(scale).add_(shift).to(dtype)


@lru_cache(maxsize=32)
def _line(
    mean: tuple[float, ...], std: tuple[float, ...], device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Scale and shift, [channels, 1, 1] each: kept, since making them waits for the device."""
    m, s = (torch.tensor(v, dtype=torch.float64).view(-1, 1, 1) for v in (mean, std))
    return (1 / (255 * s)).to(device, dtype), (-m / s).to(device, dtype)
