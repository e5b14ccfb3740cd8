"""Lossless encoding of tensors for messages, as the bytes of one file."""

from __future__ import annotations

import torch
from safetensors import SafetensorError
from torch import Tensor

from fedlens.core import Tree
from fedlens.runs.checkpoint import from_bytes, to_bytes

WHOLE, SHORT, AT, LONG = "whole", "short", "at", "long"


def to_wire(tensors: Tree) -> bytes:
    """The bytes of a safetensors file.

    An update is the difference of float32 numbers, in float64, which some differences need. Nearly
    all differences fit into float32 and are sent so; those that do not fit are listed separately.
    """
    parts = {name: _short(t.detach().cpu()) for name, t in tensors.items()}
    return to_bytes(
        {f"{name}/{kind}": t for name, some in parts.items() for kind, t in some.items()}
    )


def from_wire(content: bytes) -> Tree:
    """The tensors that `to_wire` encoded, in any order; a ValueError for any other bytes."""
    try:
        found = from_bytes(content, torch.device("cpu"))
    except SafetensorError as error:
        raise ValueError(f"it is not a file of tensors: {error}") from error
    parts: dict[str, Tree] = {}
    for path, tensor in found.items():
        name, _, kind = path.rpartition("/")
        parts.setdefault(name, {})[kind] = tensor
    return {name: _restored(some) for name, some in parts.items()}


def _short(tensor: Tensor) -> Tree:
    """The tensor in float32 if that is shorter, with the positions and values that do not fit."""
    if tensor.dtype == torch.float64:
        short, numbers = tensor.float(), tensor.flatten()
        at = (short.double().flatten().view(torch.int64) != numbers.view(torch.int64)).nonzero()
        at = at.flatten()
        if 3 * len(at) < len(numbers):  # each takes 4 bytes for its position and 8 for its value
            return {SHORT: short, AT: at.int(), LONG: numbers[at]}
    return {WHOLE: tensor}


def _restored(parts: Tree) -> Tensor:
    if parts.keys() == {WHOLE}:
        return parts[WHOLE]
    if parts.keys() != {SHORT, AT, LONG}:
        raise ValueError("a tensor lacks a part")
    short, at, long = parts[SHORT], parts[AT], parts[LONG]
    forms = [(t.dtype, t.ndim) for t in (at, long)]
    if short.dtype != torch.float32 or forms != [(torch.int32, 1), (torch.float64, 1)]:
        raise ValueError("a part of a tensor has another form")
    if len(at) != len(long) or (
        len(at) and not 0 <= int(at.min()) <= int(at.max()) < short.numel()
    ):
        raise ValueError("a part of a tensor is out of place")
    tensor = short.double()
    tensor.view(-1)[at.long()] = long
    return tensor
