"""What a worker process of the engine `processes` does until it is dismissed."""

from __future__ import annotations

import ctypes
import mmap
import os
import pickle
import resource
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedlens.client import ClientProgram
from fedlens.core import Examples, Memory, tree_map
from fedlens.engines.engine import Which
from fedlens.engines.gpus import forked
from fedlens.engines.sequential import Sequential
from fedlens.engines.shared_memory import Positions, SharedBuffer, shared_of, under
from fedlens.engines.stacked import Stacked
from fedlens.network.network import Network
from fedlens.trees import copies, moved, stack, unstack
from fedlens.uploads import Uploads
from fedlens.work import Part, Work

HEAP = 2**28  # bytes of memory that are asked for in large pages


NOWHERE: Positions = []
NOTHING: Memory = {}


class Begin(NamedTuple):
    """What the tasks that follow have in common. It is not answered."""

    model: Positions
    rest: Memory  # of the model, what its memory had no room for
    work: Work | None = None  # of the whole cohort, without memory


class Training(NamedTuple):
    """A task: let some clients of the cohort train."""

    rows: slice
    slot: int  # where what clients remember is, and what they send goes
    memory: Positions
    rest: Memory  # what they remember that did not fit


class Predicting(NamedTuple):
    """A task: the logits of some examples."""

    examples: int  # their number among those that the worker knows
    which: Which


class Answer(NamedTuple):
    """What comes back from a task."""

    result: Any  # of `Training`: scalars, and whether combined
    trees: Positions = NOWHERE  # where, in the slot, trees lie
    rest: Memory = NOTHING  # those that it had no room for
    num_bytes: int = 0  # that all trees take
    busy: float = 0.0  # seconds
    most_bytes: int = 0  # that the worker has had: of its GPU, else besides what it was forked with
    error: str = ""  # in one line, and after it with its traceback


@dataclass
class Worker:
    """It is made before the fork, so that the worker has all of this without a copy."""

    network: Network
    known: Sequence[Examples]  # the first are those that clients train on
    device: torch.device
    stacks: bool  # whether clients train side by side
    program: ClientProgram
    model: SharedBuffer
    slots: Sequence[SharedBuffer]
    _images: dict[int, Tensor] = field(default_factory=dict)
    _begun: Begin = Begin([], {})
    _moved: Memory | None = None

    def serve(self, pipe: Connection) -> None:
        forked()
        forked_with = largest_yet()
        keep_memory()
        on_gpu = self.device.type == "cuda"
        while True:
            try:
                task = pickle.loads(pipe.recv_bytes())
            except (EOFError, OSError):
                os._exit(0)
            if isinstance(task, Begin):
                self._begun, self._moved = task, None
                continue
            begun = time.perf_counter()
            try:
                if on_gpu:
                    torch.cuda.set_device(self.device)
                done = self._train(task) if isinstance(task, Training) else self._predict(task)
                busy = time.perf_counter() - begun
                most = torch.cuda.max_memory_allocated() if on_gpu else largest_yet() - forked_with
                answer = done._replace(busy=busy, most_bytes=most)
            except Exception as error:
                line = f"{type(error).__name__}: {error}".splitlines()[0]
                answer = Answer(None, error=f"{line}\n{traceback.format_exc()}")
            try:
                pipe.send_bytes(pickle.dumps(answer))
            except ConnectionError:  # the other end was killed: there is nobody to tell
                os._exit(0)

    def _train(self, task: Training) -> Answer:
        slot, whole = self.slots[task.slot], self._begun.work
        assert whole is not None
        work, shared = whole.rows(task.rows), shared_of(self._trees)
        memory = moved(_merged(slot.read(task.memory), task.rest), self.device)
        work = replace(work, memory=unstack(memory, len(work)))
        parts = self._engine.map(self.program, shared, work)
        part = next(parts) if len(work) == 1 else self._together(parts)
        trees = {"update": part.update, "counters": part.counters}
        trees |= {f"extra.{name}": tree for name, tree in part.extra.items()}
        trees |= {f"keep.{name}": tree for name, tree in stack(part.keep).items()}
        scalars = [
            {name: t.tolist() for name, t in kind.items()}
            for kind in (part.scalars, part.channel_scalars)
        ]
        return Answer((*scalars, part.combined), *slot.write(trees, after=task.memory))

    def _together(self, parts: Iterator[Part]) -> Part:
        uploads = Uploads()
        for part in parts:
            uploads.add(part)
        return uploads.whole()

    def _predict(self, task: Predicting) -> Answer:
        images = self._here(self.known[task.examples]).read(moved(task.which, self.device))
        return Answer(self.network.predict(self._trees["model"], {}, images).cpu())

    @cached_property
    def _engine(self) -> Sequential | Stacked:
        examples = self._here(self.known[0])
        if self.stacks:
            return Stacked(self.network, examples)
        return Sequential(self.network, examples, fast=True)

    @property
    def _trees(self) -> Memory:
        """What lies in the model's block, where this worker trains."""
        if self._moved is None:
            trees = _merged(self.model.read(self._begun.model), self._begun.rest)
            self._moved = moved(trees, self.device)
        return self._moved

    def _here(self, examples: Examples) -> Examples:
        """The same where this worker trains; sets that share images there share them here."""
        name = id(examples.images)
        there = examples.to(self.device, self._images.get(name))
        self._images[name] = there.images
        return there


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


def _merged(one: Memory, other: Memory) -> Memory:
    return {name: {**one.get(name, {}), **other.get(name, {})} for name in {**one, **other}}


def received(answer: Answer, slot: SharedBuffer) -> Part:
    """The part that a worker sent: what is added up at once lies in its slot, the rest does not."""
    trees, (*listed, combined) = _merged(slot.read(answer.trees), answer.rest), answer.result
    update, counters = trees.pop("update"), trees.pop("counters", {})
    if not combined:
        update = tree_map(torch.clone, update)  # it outlives its turn, the slot does not
    sent, kept = under("extra.", trees), under("keep.", trees)
    scalars, channel = (
        {n: torch.tensor(v, dtype=torch.float64) for n, v in kind.items()} for kind in listed
    )
    keep = copies(unstack(kept, len(scalars["loss"])))
    return Part(
        update,
        counters,
        sent,
        keep,
        scalars,
        combined,
        borrowed=True,
        channel_scalars=channel,
    )
