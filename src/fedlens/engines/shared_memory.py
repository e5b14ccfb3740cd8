"""Memory shared by a process and its forked workers: tensors are passed without pickling."""

from __future__ import annotations

import mmap
from typing import NamedTuple

import torch
from torch import Tensor

from fedlens.core import Memory
from fedlens.work import Shared

Positions = list[tuple[str, str, torch.dtype, tuple[int, ...], int]]
"""Where each tensor lies in a buffer: tree, name, dtype, shape, first byte."""


class Written(NamedTuple):
    """Where trees were written in a buffer, and the tensors that did not fit."""

    positions: Positions
    rest: Memory
    num_bytes: int  # of all trees, and of what is before them


class SharedBuffer:
    """A block of shared memory. Pages that are never written take no RAM."""

    def __init__(self, size: int) -> None:
        self.memory = torch.frombuffer(mmap.mmap(-1, max(size, 4096)), dtype=torch.uint8)

    def write(self, trees: Memory, after: Positions | None = None) -> Written:
        """Write trees behind those at the positions `after`, as far as there is room."""
        positions: Positions = []
        rest: Memory = {}
        first = sum(map(num_bytes, leaves(self.read(after or []))))
        for name, tree in trees.items():
            for key, tensor in tree.items():
                end = first + num_bytes(tensor)
                if end <= len(self.memory):
                    positions.append((name, key, tensor.dtype, tuple(tensor.shape), first))
                    self._view(tensor.dtype, tensor.shape, first).copy_(tensor)
                else:
                    rest.setdefault(name, {})[key] = tensor
                first = end
        return Written(positions, rest, first)

    def read(self, positions: Positions) -> Memory:
        trees: Memory = {name: {} for name, *_ in positions}
        for name, key, dtype, shape, first in positions:
            trees[name][key] = self._view(dtype, shape, first)
        return trees

    def _view(self, dtype: torch.dtype, shape: tuple[int, ...], first: int) -> Tensor:
        size = dtype.itemsize * torch.Size(shape).numel()
        return self.memory[first : first + size].view(dtype).view(shape)


def trees_of(shared: Shared) -> Memory:
    trees = {"params": shared.params, "buffers": shared.buffers, "exact": shared.exact}
    return trees | {f"told.{name}": tree for name, tree in shared.told.items()}


def shared_of(trees: Memory) -> Shared:
    params, buffers, exact = (trees.get(name, {}) for name in ("params", "buffers", "exact"))
    return Shared(params, buffers, exact, under("told.", trees))


def under(prefix: str, trees: Memory) -> Memory:
    found = {name: tree for name, tree in trees.items() if name.startswith(prefix)}
    return {name.removeprefix(prefix): tree for name, tree in found.items()}


def num_bytes(tensor: Tensor) -> int:
    """The bytes a tensor takes in a buffer, rounded up so that the next one is aligned."""
    return -(-tensor.nbytes // 64) * 64


def leaves(memory: Memory) -> list[Tensor]:
    return [tensor for tree in memory.values() for tensor in tree.values()]
