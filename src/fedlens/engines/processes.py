"""The cohort dealt out to local processes: the default on a CPU with several cores.

Workers are forked once, so they have the model, the program and the examples without a copy.
From then on only small messages cross the pipes: models and uploads lie in shared memory.
Each client is trained by one thread, and uploads are added up in cohort order, so the result is
the same to the last bit for any number of workers.
"""

from __future__ import annotations

import ctypes
import mmap
import multiprocessing
import os
import pickle
import resource
import signal
import sys
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from typing import Any, cast

import torch
from torch import Tensor

from fedlens.client import ClientProgram
from fedlens.core import Examples, Memory, tree_map
from fedlens.engines.sequential import Sequential
from fedlens.network import Network
from fedlens.work import Part, Shared, Work

UPLOADS = 512 * 2**20  # bytes of uploads that may wait to be added up


def num_cores() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def largest_yet() -> int:
    """The most bytes of memory that this process has had at any time."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class Processes:
    def __init__(self, network: Network, examples: Examples, workers: int | None = None) -> None:
        if sys.platform != "linux":
            raise ValueError('engine "processes" needs Linux: choose engine = "sequential"')
        self.inner = Sequential(network, examples, hurried=True)
        self.workers = workers or num_cores()
        self.worker_bytes = 0  # what all workers together had besides what they were forked with
        self._crew: _Crew | None = None

    def map(self, program: ClientProgram, shared: Shared, work: Work) -> Iterator[Part]:
        if self._crew is None or self._crew.program is not program:
            self.close()
            self._crew = _Crew(self.inner, program, shared, work, self.workers)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # the cores are the workers': more threads here wait for theirs
        try:
            yield from self._crew.map(shared, work)
            self.worker_bytes = max(self.worker_bytes, sum(self._crew.grown.values()))
        except BaseException:
            # Workers may be in the middle of something: the next map starts with new ones.
            self.close()
            raise
        finally:
            torch.set_num_threads(threads)

    def close(self) -> None:
        if self._crew is not None:
            self._crew.dismiss()
            self._crew = None


class _Crew:
    """Workers that know one program, and the memory they share with this process."""

    def __init__(
        self, inner: Sequential, program: ClientProgram, shared: Shared, work: Work, workers: int
    ) -> None:
        self.program = program
        remembered = sum(_room(t[0]) for t in _leaves(work.memory))
        integers = [b for b in shared.buffers.values() if not b.is_floating_point()]
        sent = sum(map(_room, (*shared.exact.values(), *integers)))
        # What an algorithm sends besides is about as much as it tells or as clients remember.
        slot_bytes = sent + 2 * (remembered + sum(map(_room, _leaves(shared.told)))) + 4096
        self.model = Block(sum(map(_room, _leaves(_trees(shared)))))
        num_slots = max(2 * workers, min(len(work), UPLOADS // slot_bytes))
        self.slots = [Block(slot_bytes) for _ in range(num_slots)]
        self.grown: dict[Any, int] = {}  # bytes, by worker
        self.pipes: list[Connection] = []
        self.processes = []
        context = multiprocessing.get_context("fork")
        for _ in range(workers):
            ours, theirs = context.Pipe()
            self.pipes.append(ours)
            process = context.Process(target=self._serve, args=(theirs, inner), daemon=True)
            with warnings.catch_warnings():
                # Python warns of forking beside threads; a worker starts none and takes no lock.
                warnings.simplefilter("ignore", DeprecationWarning)
                process.start()
            theirs.close()
            self.processes.append(process)

    def map(self, shared: Shared, work: Work) -> Iterator[Part]:
        model = self.model.write(_trees(shared))
        clients = list(range(len(work)))
        if len(work) <= len(self.slots):
            # The longest first, so that no worker is left alone with a long one at the end.
            clients.sort(key=work.plan.steps.tolist().__getitem__, reverse=True)
        idle, free = list(self.pipes), list(self.slots)
        waiting: dict[Any, tuple[int, Block]] = {}
        done: dict[int, tuple[Part, Block]] = {}
        turn = 0
        while turn < len(work):
            while clients and idle and free:
                client, pipe, slot = clients.pop(0), idle.pop(), free.pop()
                mine = work.rows(slice(client, client + 1))
                memory = slot.write(mine.memory)
                mine = replace(mine, memory={})
                message = (model, self.slots.index(slot), memory, mine)
                try:
                    pipe.send_bytes(pickle.dumps(message))
                except BrokenPipeError:
                    raise _died() from None
                waiting[pipe] = client, slot
            timeout = None
            if turn in done:
                # One at a time: while it is added up, a worker may have become idle.
                part, slot = done.pop(turn)
                yield part
                free.append(slot)
                turn, timeout = turn + 1, 0
            for ready in wait(list(waiting), timeout):
                client, slot = waiting.pop(ready)
                done[client] = self._receive(ready, slot), slot
                idle.append(cast(Connection, ready))

    def _receive(self, pipe: Any, slot: Block) -> Part:
        try:
            answer, measured, self.grown[pipe] = pickle.loads(pipe.recv_bytes())
        except EOFError:
            raise _died() from None
        if isinstance(answer, str):
            raise RuntimeError(f"a worker process failed:\n{answer}")
        trees = slot.read(answer)
        update, counters = trees.pop("update"), trees.pop("counters", {})
        if not self.program.algorithm.combine.linear:
            update = tree_map(torch.clone, update)  # it outlives its turn, the slot does not
        keep = {name: tree_map(torch.clone, t) for name, t in _under("keep.", trees).items()}
        scalars = {name: torch.tensor(v, dtype=torch.float64) for name, v in measured.items()}
        return Part(update, counters, _under("extra.", trees), keep, scalars)

    def _serve(self, pipe: Connection, inner: Sequential) -> None:
        """What a worker does until this process hangs up."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        for ours in self.pipes:
            ours.close()  # else no worker would notice that this process is gone
        torch.set_num_threads(1)
        forked_with = largest_yet()
        _keep_memory()
        while True:
            try:
                layout, number, memory, mine = pickle.loads(pipe.recv_bytes())
            except (EOFError, OSError):
                os._exit(0)
            slot = self.slots[number]
            try:
                mine = replace(mine, memory=slot.read(memory))
                (part,) = inner.map(self.program, _shared(self.model.read(layout)), mine)
                trees = {"update": part.update, "counters": part.counters}
                trees |= {f"extra.{name}": tree for name, tree in part.extra.items()}
                trees |= {f"keep.{name}": tree for name, tree in part.keep.items()}
                measured = {name: t.tolist() for name, t in part.scalars.items()}
                answer = slot.write(trees), measured, largest_yet() - forked_with
                pipe.send_bytes(pickle.dumps(answer))
            except BrokenPipeError:  # the other end was killed: there is nobody to tell
                os._exit(0)
            except Exception:
                pipe.send_bytes(pickle.dumps((traceback.format_exc(), None, 0)))

    def dismiss(self) -> None:
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            process.join()
        for pipe in self.pipes:
            pipe.close()


def _keep_memory() -> None:
    """Have this process keep the memory that it frees.

    Else every step asks the system for its larger tensors anew, page by page: an eighth of the
    time of a step on images of 16 MB.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:  # a C library without it
        return
    trim_threshold, mmap_max = -1, -4  # the numbers of these settings in malloc.h
    mallopt(mmap_max, 0)
    mallopt(trim_threshold, 2**31 - 1)


def _died() -> RuntimeError:
    return RuntimeError(
        "a worker process was killed, perhaps for want of memory: "
        'choose engine = "sequential", or a smaller local.batch_size'
    )


Lay = list[tuple[str, str, torch.dtype, tuple[int, ...], int]]
"""Where each tensor lies in a block: tree, name, dtype, shape, first byte."""


class Block:
    """A piece of memory that this process and the workers forked from it share."""

    def __init__(self, size: int) -> None:
        self.memory = torch.frombuffer(mmap.mmap(-1, max(size, 4096)), dtype=torch.uint8)

    def write(self, trees: Memory) -> Lay:
        lay: Lay = []
        first = 0
        for name, tree in trees.items():
            for key, tensor in tree.items():
                if first + _room(tensor) > len(self.memory):
                    raise RuntimeError("an upload is larger than the memory set aside for it")
                lay.append((name, key, tensor.dtype, tuple(tensor.shape), first))
                self._view(tensor.dtype, tensor.shape, first).copy_(tensor)
                first += _room(tensor)
        return lay

    def read(self, lay: Lay) -> Memory:
        trees: Memory = {name: {} for name, *_ in lay}
        for name, key, dtype, shape, first in lay:
            trees[name][key] = self._view(dtype, shape, first)
        return trees

    def _view(self, dtype: torch.dtype, shape: tuple[int, ...], first: int) -> Tensor:
        size = dtype.itemsize * torch.Size(shape).numel()
        return self.memory[first : first + size].view(dtype).view(shape)


def _trees(shared: Shared) -> Memory:
    trees = {"params": shared.params, "buffers": shared.buffers, "exact": shared.exact}
    return trees | {f"told.{name}": tree for name, tree in shared.told.items()}


def _shared(trees: Memory) -> Shared:
    params, buffers, exact = (trees.get(name, {}) for name in ("params", "buffers", "exact"))
    return Shared(params, buffers, exact, _under("told.", trees))


def _under(prefix: str, trees: Memory) -> Memory:
    found = {name: tree for name, tree in trees.items() if name.startswith(prefix)}
    return {name.removeprefix(prefix): tree for name, tree in found.items()}


def _room(tensor: Tensor) -> int:
    """The bytes a tensor takes in a block, rounded up so that the next one is aligned."""
    return -(-tensor.nbytes // 64) * 64


def _leaves(memory: Memory) -> list[Tensor]:
    return [tensor for tree in memory.values() for tensor in tree.values()]
