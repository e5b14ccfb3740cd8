"""Values on their way to another machine: what is small as bytes, tensors as arrays beside them.

Whoever gets a message finds its tensors where the arrays lie, without a copy: they are read only.
"""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Bytes = NDArray[np.uint8]


class Message(NamedTuple):
    content: bytes
    tensors: list[Bytes]


def pack(value: Any) -> Message:
    tensors: list[Bytes] = []
    content = io.BytesIO()
    _Pickler(content, tensors).dump(value)
    return Message(content.getvalue(), tensors)


def unpack(message: Message) -> Any:
    return _Unpickler(io.BytesIO(message.content), message.tensors).load()


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, tensors: list[Bytes]) -> None:
        super().__init__(file, protocol=5)
        self.tensors = tensors

    def persistent_id(self, value: Any) -> Any:
        if type(value) is not Tensor:
            return None
        # As it lies in memory, where nothing lies between its numbers: rounding may depend on it.
        strides = value.stride()
        axes = sorted(range(value.ndim), key=lambda axis: -strides[axis])
        dense = value.detach().permute(axes)
        if not dense.is_contiguous():
            axes, dense = list(range(value.ndim)), value.detach().contiguous()
        self.tensors.append(dense.reshape(-1).view(torch.uint8).numpy())
        return len(self.tensors) - 1, value.dtype, tuple(dense.shape), axes


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensors: Sequence[Bytes]) -> None:
        super().__init__(file)
        self.tensors = tensors

    def persistent_load(self, pid: Any) -> Tensor:
        number, dtype, shape, axes = pid
        flat = self.tensors[number]
        if not flat.size:
            dense = torch.empty(shape, dtype=dtype)
        else:
            with warnings.catch_warnings():
                # torch warns of arrays that are read only; nobody writes to what was sent.
                warnings.simplefilter("ignore", UserWarning)
                dense = torch.from_numpy(flat).view(dtype).view(shape)
        back = [axes.index(axis) for axis in range(len(axes))]
        return dense.permute(back)
