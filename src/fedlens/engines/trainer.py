"""The tasks of a worker, in any kind of process: train clients, and predict."""

from __future__ import annotations

import ctypes
import mmap
import resource
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedlens.client import ClientProgram
from fedlens.core import Memory, tree_map
from fedlens.engines.engine import Which
from fedlens.engines.sequential import Sequential
from fedlens.engines.shared_memory import shared_of, under
from fedlens.engines.stacked import Stacked
from fedlens.federation import Examples
from fedlens.network.network import Network
from fedlens.own_code import mistake_of
from fedlens.trees import copies, moved, stack, unstack
from fedlens.uploads import Uploads
from fedlens.work import Part, Work

HEAP = 2**28  # bytes of heap that are requested in large pages


class Sent(NamedTuple):
    """A `Part` as it is sent between processes: tensors as trees, and scalars as lists."""

    trees: Memory
    scalars: dict[str, list[float]]
    channel_scalars: dict[str, list[float]]
    combined: bool


class Done(NamedTuple):
    """The result of a task, and its cost."""

    result: Any  # `Sent` after training, logits after predicting
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
    _given: Memory = field(default_factory=dict)
    _moved: Memory | None = None
    _bytes_before: int = 0

    def configure_process(self) -> None:
        """Configure this process as a worker: one thread, and an allocator that keeps memory."""
        torch.set_num_threads(1)
        self._bytes_before = largest_yet()
        keep_memory()

    def begin(self, trees: Memory) -> None:
        """Set what the next tasks share: what all clients get, or a `model` to predict with."""
        self._given, self._moved = trees, None

    def do(self, task: Callable[[], Any]) -> Done:
        """Run a task of this trainer; return its result, or its error."""
        begun, on_gpu = time.perf_counter(), self.device.type == "cuda"
        try:
            if on_gpu:
                torch.cuda.set_device(self.device)
            result = task()
            busy = time.perf_counter() - begun
            most = torch.cuda.max_memory_allocated() if on_gpu else self._more_bytes
            return Done(result, busy, most)
        except Exception as error:
            mistake = mistake_of(error)
            line = mistake or f"{type(error).__name__}: {error}"
            told = f"{line.splitlines()[0]}\n{traceback.format_exc()}"
            return Done(None, error=told, is_mistake=bool(mistake))

    def train(self, work: Work) -> Sent:
        """Train clients; `work` contains these clients only."""
        memory = moved(stack(work.memory), self.device)
        work = replace(work, memory=unstack(memory, len(work)))
        assert self.program is not None
        parts = self._engine.map(self.program, shared_of(self._trees), work)
        part = next(parts) if len(work) == 1 else _together(parts)
        trees = {"update": part.update, "counters": part.counters}
        trees |= {f"extra.{name}": tree for name, tree in part.extra.items()}
        trees |= {f"keep.{name}": tree for name, tree in stack(part.keep).items()}
        return Sent(trees, _lists(part.scalars), _lists(part.channel_scalars), part.combined)

    def predict(self, number: int, which: Which) -> Tensor:
        """The logits of some examples of the set with this number."""
        examples, model = self._here(self.example_sets[number]), self._trees["model"]
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
    def _trees(self) -> Memory:
        """What `begin` set, on the device of this worker."""
        if self._moved is None:
            self._moved = moved(self._given, self.device)
        return self._moved

    @property
    def _more_bytes(self) -> int:
        return largest_yet() - self._bytes_before

    def _here(self, examples: Examples) -> Examples:
        """The examples on this worker's device; sets that share images share them there, too."""
        name = id(examples.images)
        there = examples.to(self.device, self._images.get(name))
        self._images[name] = there.images
        return there


def received(sent: Sent) -> Part:
    """Make a part of what a worker sent. The next answer may overwrite the memory of its trees."""
    trees = dict(sent.trees)
    update, counters = trees.pop("update"), trees.pop("counters", {})
    if not sent.combined:
        update = tree_map(torch.clone, update)  # it is kept; a combined update is added up at once
    scalars, channel = (
        {n: torch.tensor(v, dtype=torch.float64) for n, v in kind.items()}
        for kind in (sent.scalars, sent.channel_scalars)
    )
    return Part(
        update,
        counters,
        extra=under("extra.", trees),
        keep=copies(unstack(under("keep.", trees), len(scalars["loss"]))),
        scalars=scalars,
        combined=sent.combined,
        borrowed=True,
        channel_scalars=channel,
    )


def _together(parts: Iterator[Part]) -> Part:
    uploads = Uploads()
    for part in parts:
        uploads.add(part)
    return uploads.whole()


def _lists(scalars: Mapping[str, Tensor]) -> dict[str, list[float]]:
    return {name: t.tolist() for name, t in scalars.items()}


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
