"""How kernels are launched, and how many of them are compiled at once.

Triton compiles a kernel when it is first launched. One after another that takes longer than many a
run; but it is threads' work, and there are several cores.
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

ALIGNED = 16  # bytes: Triton compiles another kernel for a tensor that does not start so

_noted: dict[object, Callable[[], Any]] | None = None  # by what is compiled; None: it is launched


def launchable(function: Callable[..., None] | None = None, **settings: Any) -> Any:
    """`triton.jit` of a kernel that is launched as `function[grid](...)`."""
    if function is None:
        return partial(launchable, **settings)
    return Kernel(triton.jit(function, **settings))


@dataclass(frozen=True)
class Kernel:
    """A kernel that is launched, or noted to be compiled."""

    jit: Any

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        if _noted is None:
            launch: Callable[..., None] = self.jit[grid]
            return launch
        return partial(self._note, _noted)

    def _note(self, noted: dict[object, Callable[[], Any]], *given: Any, **settings: Any) -> None:
        if isinstance(given[0], Tensor):
            # A thread has a CUDA context from its first launch on; cuBLAS warns if it has none.
            given[0].new_zeros(1)
        like = StandIn.of(given)
        key = self.jit, like, tuple(settings.items())
        noted[key] = partial(self.jit.warmup, *like, grid=(1,), **settings)


@dataclass(frozen=True)
class StandIn:
    """A tensor to a compiler: what it holds need not be kept."""

    dtype: torch.dtype
    offset: int

    @classmethod
    def of(cls, value: Any) -> Any:
        """It for a tensor, also for those in a tuple; else the value."""
        if type(value) is tuple:
            return tuple(map(cls.of, value))
        return cls(value.dtype, value.data_ptr() % ALIGNED) if isinstance(value, Tensor) else value

    def data_ptr(self) -> int:
        return self.offset


@triton.jit
def _empty_kernel():  # type: ignore[no-untyped-def]
    pass


def prepare() -> None:
    """Have Triton load its driver and compute its checksum, once: each kernel would compute it.

    Triton has no call for that but to compile a kernel. What fails here is told by the first one
    that is needed.
    """
    with suppress(Exception):
        _empty_kernel.warmup(grid=(1,))


@contextmanager
def compiled_at_the_end() -> Iterator[None]:
    """Launch no kernel meanwhile, and at the end compile all that would have been.

    What is computed meanwhile means nothing. The backward pass runs in a thread of its own, so this
    holds for all threads.
    """
    global _noted
    noted = _noted = {}
    try:
        yield
    finally:
        _noted = None
    on_gpu: Any = ()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        # A thread starts on the first GPU.
        on_gpu = torch.cuda.set_device, (torch.cuda.current_device(),)
    with ThreadPoolExecutor(None, "compile", *on_gpu) as threads:
        for done in [threads.submit(compile_it) for compile_it in noted.values()]:
            done.result()
