"""How kernels are launched, and how many kernels are compiled in parallel.

Triton compiles a kernel when it is first launched. Compiled one after another, the kernels can take
longer than a short run; threads compile them in parallel on several cores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor

ALIGNED = 16  # bytes: for a tensor whose address is not a multiple, Triton compiles another kernel

_noted: dict[object, Callable[[], Any]] | None = None  # kernels to compile; None: launch


def launchable(function: Callable[..., None] | None = None, **settings: Any) -> Any:
    """Decorator like `triton.jit`, for a kernel that is launched as `function[grid](...)`."""
    if function is None:
        return partial(launchable, **settings)
    return Kernel(triton.jit(function, **settings))


@dataclass(frozen=True)
class Kernel:
    """A kernel that is launched, or recorded to be compiled later."""

    jit: Any

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        if _noted is None:
            launch: Callable[..., None] = self.jit[grid]
            return launch
        return partial(self._note, _noted)

    def _note(self, noted: dict[object, Callable[[], Any]], *given: Any, **settings: Any) -> None:
        if isinstance(given[0], Tensor):
            # The first launch gives a thread its CUDA context; cuBLAS warns if it has none.
            given[0].new_zeros(1)
        like = StandIn.of(given)
        key = self.jit, like, tuple(settings.items())
        noted[key] = partial(self.jit.warmup, *like, grid=(1,), **settings)


@dataclass(frozen=True)
class StandIn:
    """A tensor's dtype and alignment, for the compiler: the tensor itself can be freed."""

    dtype: torch.dtype
    offset: int

    @classmethod
    def of(cls, value: Any) -> Any:
        """A stand-in for a tensor, also for each tensor in a tuple; else the value itself."""
        if type(value) is tuple:
            return tuple(map(cls.of, value))
        return cls(value.dtype, value.data_ptr() % ALIGNED) if isinstance(value, Tensor) else value

    def data_ptr(self) -> int:
        return self.offset


@triton.jit
def _empty_kernel():  # type: ignore[no-untyped-def]
    pass


def prepare() -> None:
    """Make Triton load its driver and compute its checksum once; else each kernel computes it.

    Triton's only call for this is to compile a kernel. An error here is ignored: the first kernel
    that is needed raises it again.
    """
    with suppress(Exception):
        _empty_kernel.warmup(grid=(1,))


@contextmanager
def compiled_at_the_end() -> Iterator[None]:
    """A context that launches no kernel, and compiles all of its kernels when it ends.

    Results computed in it are meaningless. It applies to all threads, because the backward pass
    runs in a separate thread.
    """
    global _noted
    noted = _noted = {}
    try:
        yield
    finally:
        _noted = None
    on_gpu: Any = ()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        # A new thread uses the first GPU by default.
        on_gpu = torch.cuda.set_device, (torch.cuda.current_device(),)
    with ThreadPoolExecutor(None, "compile", *on_gpu) as threads:
        for done in [threads.submit(compile_it) for compile_it in noted.values()]:
            done.result()
