"""What a worker does, in whatever process it is: let clients train, predict."""

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

HEAP = 2**28  # bytes of memory that are asked for in large pages


class Sent(NamedTuple):
    """A `Part` on its way between processes: tensors in trees, and what is small."""

    trees: Memory
    scalars: dict[str, list[float]]
    channel_scalars: dict[str, list[float]]
    combined: bool


class Done(NamedTuple):
    """What came of a task, and what it took."""

    result: Any  # of training `Sent`, of predicting logits
    busy: float = 0.0  # seconds
    most_bytes: int = 0  # that the worker has had: of its GPU, else besides what it began with
    error: str = ""  # in one line, and after it with its traceback
    is_mistake: bool = False  # the user's

    def check(self) -> None:
        """Raise the error, if there is one, as it would be raised without workers."""
        if self.is_mistake:
            line, _, raised = self.error.partition("\n")
            raise ValueError(line) from RuntimeError(raised)
        if self.error:
            raise RuntimeError(f"a worker failed: {self.error}")


@dataclass
class Trainer:
    """It has the model, the examples and a program; `begin` gives it what a round starts from."""

    network: Network
    example_sets: Sequence[Examples]  # the first are those that clients train on
    device: torch.device
    stacks: bool  # whether clients train side by side
    program: ClientProgram | None = None  # until it is given
    _images: dict[int, Tensor] = field(default_factory=dict)
    _given: Memory = field(default_factory=dict)
    _moved: Memory | None = None
    _bytes_before: int = 0

    def configure_process(self) -> None:
        """Make this process a worker's: one thread, and memory that it keeps."""
        torch.set_num_threads(1)
        self._bytes_before = largest_yet()
        keep_memory()

    def begin(self, trees: Memory) -> None:
        """What the tasks that follow have in common: what clients are sent, or a `model`."""
        self._given, self._moved = trees, None

    def do(self, task: Callable[[], Any]) -> Done:
        """The result of a task of this trainer, or its error."""
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
        """Let clients train; `work` is theirs alone."""
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
        """The logits of some examples, of the set with this number."""
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
        """What was given to begin with, where this worker trains."""
        if self._moved is None:
            self._moved = moved(self._given, self.device)
        return self._moved

    @property
    def _more_bytes(self) -> int:
        return largest_yet() - self._bytes_before

    def _here(self, examples: Examples) -> Examples:
        """The same where this worker trains; sets that share images there share them here."""
        name = id(examples.images)
        there = examples.to(self.device, self._images.get(name))
        self._images[name] = there.images
        return there


def received(sent: Sent) -> Part:
    """The part that a worker sent, whose trees lie where the next one's may be written."""
    trees = dict(sent.trees)
    update, counters = trees.pop("update"), trees.pop("counters", {})
    if not sent.combined:
        update = tree_map(torch.clone, update)  # it outlives its turn; what is added up does not
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
    """Have this process keep the memory that it frees, and ask for it in large pages.

    Else every step asks the system for its larger tensors anew, page by page: an eighth of the
    time of a step on images of 16 MB. And with small pages the processor looks up addresses
    all the time.
    """
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallopt"):  # another C library than GNU's
        return
    trim_threshold, mmap_max = -1, -4  # the numbers of these settings in malloc.h
    library.mallopt(mmap_max, 0)
    library.mallopt(trim_threshold, 2**31 - 1)
    library.malloc.restype, large_pages = ctypes.c_void_p, 14  # its number in mman.h
    first = library.malloc(ctypes.c_size_t(HEAP))  # none of it is used yet, so it takes no room
    if first:
        page = -(-first // mmap.PAGESIZE) * mmap.PAGESIZE
        size = (first + HEAP - page) // mmap.PAGESIZE * mmap.PAGESIZE
        library.madvise(ctypes.c_void_p(page), ctypes.c_size_t(size), large_pages)
        library.free(ctypes.c_void_p(first))
