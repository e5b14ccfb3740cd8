"""Whole numbers of a few bits each, side by side in bytes."""

import numpy as np
import torch
from torch import Tensor

SCALE_BITS = 32
"""Of the number that codes are multiplied by."""


def to_bits(codes: Tensor, width: int) -> Tensor:
    """Numbers [n] from 0 to 2^width - 1 as bytes [n width / 8, rounded up]."""
    field = (codes.long()[:, None] >> torch.arange(width)) & 1
    return torch.from_numpy(np.packbits(field.byte().flatten().numpy(), bitorder="little"))


def from_bits(content: Tensor, count: int, width: int) -> Tensor:
    """The `count` numbers that `to_bits` was given."""
    if content.dtype != torch.uint8 or content.shape != (-(-count * width // 8),):
        raise ValueError(f"a tensor is not {count} numbers of {width} bits")
    field = np.unpackbits(content.numpy(), count=count * width, bitorder="little")
    numbers = torch.from_numpy(field).view(count, width).long() << torch.arange(width)
    return numbers.sum(1)


def scale_and_codes(parts: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The parts of a tensor that was sent as a scale and codes; a ValueError for any others."""
    scale, codes = parts.get("scale"), parts.get("codes")
    if scale is None or codes is None or scale.shape or scale.dtype != torch.float32:
        raise ValueError("a tensor lacks its scale or its codes")
    return scale, codes
