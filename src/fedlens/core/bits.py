"""Whole numbers of a few bits each, side by side in bytes."""

import numpy as np
import torch
from torch import Tensor

SCALE_BITS = 32
"""Of the number that codes are multiplied by."""


def to_bits(codes: Tensor, width: int) -> Tensor:
    """Numbers [n] from 0 to 2^width - 1 as bytes [n width / 8, rounded up]."""
    each = codes.long().contiguous().numpy().astype("<i8").view(np.uint8).reshape(len(codes), 8)
    if width % 8 == 0:
        return torch.from_numpy(each[:, : width // 8].flatten())
    bits = np.unpackbits(each, axis=1, count=width, bitorder="little")
    return torch.from_numpy(np.packbits(bits, bitorder="little"))


def from_bits(content: Tensor, count: int, width: int) -> Tensor:
    """The `count` numbers that `to_bits` was given; a ValueError for any other bytes."""
    if content.dtype != torch.uint8 or content.shape != (-(-count * width // 8),):
        raise ValueError(f"a tensor is not {count} numbers of {width} bits")
    words = np.zeros((count, 8), np.uint8)
    if width % 8 == 0:
        words[:, : width // 8] = content.numpy().reshape(count, width // 8)
    else:
        bits = np.unpackbits(content.numpy(), count=count * width, bitorder="little")
        each = np.packbits(bits.reshape(count, width), axis=1, bitorder="little")
        words[:, : each.shape[1]] = each
    return torch.from_numpy(words.view("<i8")[:, 0].astype(np.int64))


def scale_and_codes(parts: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The parts of a tensor that was sent as a scale and codes; a ValueError for any others."""
    scale, codes = parts.get("scale"), parts.get("codes")
    if scale is None or codes is None or scale.shape or scale.dtype != torch.float32:
        raise ValueError("a tensor lacks its scale or its codes")
    return scale, codes
