"""Memory shared by a process and its forked workers: tensors are passed without pickling."""

from __future__ import annotations

import mmap
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedlens.core.trees import map_tensors, tensors_in


class Place(NamedTuple):
    """Where a tensor lies in a buffer."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    first: int  # byte


class Written(NamedTuple):
    """A value whose tensors lie in a buffer, as far as there was room."""

    value: Any  # with a `Place` for each of these tensors
    end: int  # the byte after all of its tensors, if there had been room


class SharedBuffer:
    """A block of shared memory. Pages that are never written take no RAM."""

    def __init__(self, size: int) -> None:
        self.memory = torch.frombuffer(mmap.mmap(-1, max(size, 4096)), dtype=torch.uint8)

    def write(self, value: Any, after: int = 0) -> Written:
        """Write the tensors of `value` behind the byte `after`."""
        end = after

        def placed(tensor: Tensor) -> Any:
            nonlocal end
            place = Place(tensor.dtype, tuple(tensor.shape), end)
            end += num_bytes(tensor)
            if end > len(self.memory):
                return tensor.cpu()
            self._at(place).copy_(tensor)
            return place

        return Written(map_tensors(value, placed), end)

    def read(self, value: Any) -> Any:
        """The value that was written. Its tensors are views of this memory."""
        return map_tensors(value, self._at, Place)

    def _at(self, place: Place) -> Tensor:
        size = place.dtype.itemsize * torch.Size(place.shape).numel()
        return self.memory[place.first : place.first + size].view(place.dtype).view(place.shape)


def num_bytes(value: Any) -> int:
    """The bytes that tensors take in a buffer; each is rounded up so that the next is aligned."""
    return sum(-(-tensor.nbytes // 64) * 64 for tensor in tensors_in(value))
