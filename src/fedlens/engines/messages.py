"""Messages to other machines: small values as bytes, large tensors as separate arrays.

Unpacked tensors share the memory of these arrays, without a copy, so they are read-only.
"""

from __future__ import annotations

import io
import pickle
import platform
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

SMALL = 2**16  # most bytes of a tensor that is pickled with the rest

Bytes = NDArray[np.uint8]
Message = bytes | tuple[bytes, list[Bytes]]
"""Only plain values and arrays: Ray takes longer to serialise records than to send them."""


def pack(value: Any, known: Sequence[Tensor] = ()) -> Message:
    """The message of a value; the place of a tensor that is also `known` there is sent instead."""
    tensors: list[Bytes] = []

    def reduced(tensor: Tensor) -> tuple[Any, ...]:
        dense, axes = tensor.detach(), None
        if not dense.is_contiguous():
            # Keep the memory layout if it is dense: rounding may depend on it.
            strides = tensor.stride()
            axes = sorted(range(tensor.ndim), key=lambda axis: -strides[axis])
            dense = dense.permute(axes)
            if not dense.is_contiguous():
                dense, axes = tensor.detach().contiguous(), None
        flat: Bytes = dense.reshape(-1).view(torch.uint8).numpy()
        if flat.nbytes > SMALL:
            tensors.append(flat)
        return _tensor, (pickle.PickleBuffer(flat.data), tensor.dtype, tuple(dense.shape), axes)

    file = io.BytesIO()
    kind = _Pickler if known else pickle.Pickler
    pickler = kind(file, protocol=5, buffer_callback=lambda b: b.raw().nbytes <= SMALL)
    pickler.dispatch_table = {Tensor: reduced}
    if isinstance(pickler, _Pickler):
        pickler.known = {id(one): (place, tuple(one.shape)) for place, one in enumerate(known)}
    pickler.dump(value)
    return (file.getvalue(), tensors) if tensors else file.getvalue()


def unpack(message: Message, known: Sequence[Tensor] = ()) -> Any:
    content, tensors = (message, []) if isinstance(message, bytes) else message
    unpickler = _Unpickler(io.BytesIO(content), buffers=tensors)
    unpickler.known = known
    return unpickler.load()


class _Pickler(pickle.Pickler):
    known: dict[int, tuple[int, tuple[int, ...]]]  # places and shapes, by `id`

    def persistent_id(self, value: Any) -> Any:
        return self.known.get(id(value))


class _Unpickler(pickle.Unpickler):
    known: Sequence[Tensor]

    def persistent_load(self, sent: Any) -> Any:
        place, shape = sent
        mine = self.known[place]
        if mine.shape != shape:
            raise ValueError(
                f"its images on {platform.node()} are {tuple(mine.shape)}, not {shape}: copy the "
                "data folder there"
            )
        return mine


def arrays_of(message: Message) -> list[Bytes]:
    return [] if isinstance(message, bytes) else message[1]


def _tensor(
    buffer: Any, dtype: torch.dtype, shape: tuple[int, ...], axes: list[int] | None
) -> Tensor:
    flat = np.asarray(memoryview(buffer))
    if not flat.size:
        dense = torch.empty(shape, dtype=dtype)
    elif flat.flags.writeable:
        dense = torch.from_numpy(flat).view(dtype).view(shape)
    else:
        with warnings.catch_warnings():
            # torch warns about read-only arrays; received tensors are never written to.
            warnings.simplefilter("ignore", UserWarning)
            dense = torch.from_numpy(flat).view(dtype).view(shape)
    if axes is None:
        return dense
    return dense.permute([axes.index(axis) for axis in range(len(axes))])
