"""Messages to other machines: values, and what their workers need of this process.

A message has small values as bytes, and large tensors as separate arrays. Unpacked tensors share
the memory of these arrays, without a copy, so they are read-only.

The user's own modules lie beside an experiment, and other machines may not have them. So they are
sent as source text, and a worker imports the same modules as its driver. (A `runtime_env` of Ray
sends files only when a process connects to the cluster, and these modules may be imported later.)
"""

from __future__ import annotations

import importlib.util
import io
import pickle
import platform
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import InspectLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedlens.config.consent import is_own
from fedlens.version import __version__

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


class Source(NamedTuple):
    """The source of a module, as it is sent."""

    text: str
    file: str  # its path on the driver's machine
    is_package: bool


class Driver(NamedTuple):
    versions: dict[str, str]
    modules: dict[str, Source]  # the user's own modules, by name

    @classmethod
    def here(cls) -> Driver:
        return cls(_versions(), _own_modules())

    def set_up_worker(self) -> str:
        """Make a worker like its driver; return one line that says why it fails, or ""."""
        mine = _versions()
        for name, version in self.versions.items():
            if mine.get(name) != version:
                return (
                    f"{platform.node()} has {name} {mine.get(name)}, not {version}: "
                    "install the same on every node"
                )
        sys.meta_path.insert(0, _SentCode(self.modules))
        return ""


def _versions() -> dict[str, str]:
    """The versions that results depend on; builds of one version for other devices are equal."""
    found = {"fedlens": __version__, "torch": torch.__version__, "numpy": np.__version__}
    return {name: str(version).partition("+")[0] for name, version in found.items()}


def _own_modules() -> dict[str, Source]:
    found = {}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if name in ("__main__", "__mp_main__") or not isinstance(file, str):
            continue
        path = Path(file)
        if path.suffix == ".py" and is_own(path):
            text = importlib.util.decode_source(path.read_bytes())
            found[name] = Source(text, str(path), hasattr(module, "__path__"))
    return found


class _SentCode(MetaPathFinder, InspectLoader):
    """Imports modules from the source that was sent, before the files of this machine."""

    def __init__(self, modules: dict[str, Source]) -> None:
        self.modules = modules

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self.modules:
            return None
        sent = self.modules[fullname]
        spec = ModuleSpec(fullname, self, origin=sent.file, is_package=sent.is_package)
        spec.has_location = True  # tracebacks and `__file__` name the driver's file
        if sent.is_package:  # for submodules that the driver had not imported
            spec.submodule_search_locations = [str(Path(sent.file).parent)]
        return spec

    def get_source(self, fullname: str) -> str:
        return self.modules[fullname].text

    def get_code(self, fullname: str) -> CodeType:
        sent = self.modules[fullname]
        return self.source_to_code(sent.text, sent.file)
