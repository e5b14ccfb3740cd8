"""The tasks of a worker, in any kind of process: train clients, and predict."""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedlens.config.consent import mistake_of
from fedlens.core import Memory, Tree, tree_map
from fedlens.core.federation import Examples
from fedlens.core.trees import copies, map_tensors, moved, stack, unstack
from fedlens.engines.sequential import Sequential
from fedlens.engines.stacked import Stacked
from fedlens.network.network import Network
from fedlens.rounds.client import ClientProgram
from fedlens.rounds.engine import Which
from fedlens.rounds.uploads import Uploads
from fedlens.rounds.work import Part, Shared, Work

CUBLAS = "CUBLAS_WORKSPACE_CONFIG"  # cuBLAS is deterministic only if this is set
HEAP = 2**28  # bytes of heap that are requested in large pages


class Training(NamedTuple):
    """A task: train some clients of the cohort."""

    rows: slice
    memory: Memory  # theirs, with a row for each


class Predicting(NamedTuple):
    """A task: the logits of some examples."""

    examples: int  # the number of the worker's example set
    which: Which


Task = Training | Predicting


class Trained(NamedTuple):
    """What comes back from clients, as it is sent."""

    part: Part  # without what they keep
    keep: Memory  # with a row for each

    def received(self) -> Part:
        """The part of these clients. The next result may overwrite the memory of its update."""
        part, kept = self.part, unstack(self.keep, self.part.num_clients)
        scalars, channel_scalars, keep = copies((part.scalars, part.channel_scalars, kept))
        update = part.update
        if not part.combined:
            update = tree_map(torch.clone, update)  # it is kept; a combined one is added up at once
        return part._replace(
            update=update,
            keep=keep,
            scalars=scalars,
            channel_scalars=channel_scalars,
            borrowed=True,
        )


class Result(NamedTuple):
    """The result of a task, and its cost."""

    value: Any  # `Trained`, or logits
    busy: float = 0.0  # seconds
    most_bytes: int = 0  # peak memory of the worker: on its GPU, else RAM beyond its initial RAM
    error: str = ""  # a line that describes it, then its traceback
    is_mistake: bool = False  # whether the user made the error

    def check(self) -> None:
        """Raise the error, if there is one, as it would be raised without workers."""
        if self.is_mistake:
            line, _, raised = self.error.partition("\n")
            raise ValueError(line) from RuntimeError(raised)
        if self.error:
            raise RuntimeError(f"a worker failed: {self.error}")


@dataclass
class Trainer:
    """Trains clients and predicts, in a worker. `begin` sets what the tasks of a round share."""

    network: Network
    example_sets: Sequence[Examples]  # clients train on the first set
    device: torch.device
    stacks: bool  # whether clients train side by side
    program: ClientProgram | None = None  # until it is set
    _images: dict[int, Tensor] = field(default_factory=dict)
    _given: Any = None  # `Shared` or a model
    _moved: Any = None  # the same on the device of this worker
    _work: Work | None = None
    _bytes_before: int = 0

    def configure_process(self) -> None:
        """Configure this process as a worker: one thread, and an allocator that keeps memory."""
        torch.set_num_threads(1)
        self._bytes_before = largest_yet()
        keep_memory()

    def begin(self, given: Shared | Tree, work: Work | None) -> None:
        """Set what the next tasks have in common.

        To train: what all clients get, and the `work` of the whole cohort, without memory. To
        predict: a model.
        """
        self._given, self._moved, self._work = given, None, work

    def do(self, task: Task, send: Callable[[Any], Any]) -> Result:
        """Do a task; return what `send` makes of the result, or the error."""
        begun, on_gpu = time.perf_counter(), self.device.type == "cuda"
        try:
            if on_gpu:
                torch.cuda.set_device(self.device)
            trains = isinstance(task, Training)
            value = send(self._train(*task) if trains else self._predict(*task))
            busy = time.perf_counter() - begun
            more = largest_yet() - self._bytes_before
            most = torch.cuda.max_memory_allocated() if on_gpu else more
            return Result(value, busy, most)
        except Exception as error:
            mistake = mistake_of(error)
            line = mistake or f"{type(error).__name__}: {error}"
            told = f"{line.splitlines()[0]}\n{traceback.format_exc()}"
            return Result(None, error=told, is_mistake=bool(mistake))

    def _train(self, rows: slice, memory: Memory) -> Trained:
        assert self.program is not None and self._work is not None
        work = self._work.rows(rows)
        work = replace(work, memory=unstack(moved(memory, self.device), len(work)))
        parts = self._engine.map(self.program, self._there, work)
        if len(work) == 1:
            part = next(parts)
        else:
            uploads = Uploads()
            for each in parts:
                uploads.add(each)
            part = uploads.whole()
        scalars, channel_scalars = map_tensors((part.scalars, part.channel_scalars), Tensor.double)
        sent = part._replace(keep=(), scalars=scalars, channel_scalars=channel_scalars)
        return Trained(sent, stack(part.keep))

    def _predict(self, number: int, which: Which) -> Tensor:
        examples, model = self._here(self.example_sets[number]), self._there
        which, recorder = moved(which, self.device), self._engine.evaluation_recorder
        logits: Tensor | None = None
        if recorder is not None:
            images = examples.read(which)
            logits = recorder("logits", self.network.predict_stacked, model, images)
        if logits is None:
            (logits,) = self._engine.predict(model, examples, [which])
        return logits.cpu()

    @cached_property
    def _engine(self) -> Sequential | Stacked:
        examples = self._here(self.example_sets[0])
        if self.stacks:
            return Stacked(self.network, examples)
        return Sequential(self.network, examples, fast=True)

    @property
    def _there(self) -> Any:
        """What `begin` set, on the device of this worker."""
        if self._moved is None:
            self._moved = moved(self._given, self.device)
        return self._moved

    def _here(self, examples: Examples) -> Examples:
        """The examples on this worker's device; sets that share images share them there, too."""
        name = id(examples.images)
        there = examples.to(self.device, self._images.get(name))
        self._images[name] = there.images
        return there


class TorchSettings(NamedTuple):
    """The global settings of torch in this process, to apply them again, or in another one."""

    matmul: str
    tf32: bool
    deterministic: bool
    workspace: str | None

    @classmethod
    def here(cls) -> TorchSettings:
        return cls(
            torch.get_float32_matmul_precision(),
            torch.backends.cudnn.allow_tf32,
            torch.are_deterministic_algorithms_enabled(),
            os.environ.get(CUBLAS),
        )

    def apply(self) -> None:
        torch.set_float32_matmul_precision(self.matmul)
        torch.backends.cudnn.allow_tf32 = self.tf32
        if self.workspace is None:
            os.environ.pop(CUBLAS, None)
        else:
            os.environ[CUBLAS] = self.workspace
        if self.deterministic != torch.are_deterministic_algorithms_enabled():
            # The call takes a second: torch imports its compiler.
            torch.use_deterministic_algorithms(self.deterministic)


def largest_yet() -> int:
    """The most bytes of memory that this process has had at any time."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def keep_memory() -> None:
    """Make this process keep the memory that it frees, and use large pages.

    Otherwise every step requests its larger tensors from the system again, page by page: an eighth
    of the time of a step on images of 16 MB. With small pages the processor also spends much time
    on address translation.
    """
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallopt"):  # not the GNU C library
        return
    trim_threshold, mmap_max = -1, -4  # the numbers of these settings in malloc.h
    library.mallopt(mmap_max, 0)
    library.mallopt(trim_threshold, 2**31 - 1)
    library.malloc.restype, large_pages = ctypes.c_void_p, 14  # MADV_HUGEPAGE in mman.h
    first = library.malloc(ctypes.c_size_t(HEAP))  # no page is touched yet, so it takes no RAM
    if first:
        page = -(-first // mmap.PAGESIZE) * mmap.PAGESIZE
        size = (first + HEAP - page) // mmap.PAGESIZE * mmap.PAGESIZE
        library.madvise(ctypes.c_void_p(page), ctypes.c_size_t(size), large_pages)
        library.free(ctypes.c_void_p(first))
