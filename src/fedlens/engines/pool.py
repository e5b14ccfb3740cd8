"""Worker processes that know one program, and the memory they share with this process."""

from __future__ import annotations

import multiprocessing
import pickle
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

import torch

from fedlens.client import ClientProgram
from fedlens.core import Memory, Tree
from fedlens.engines.costs import Costs
from fedlens.engines.gpus import check_unused, fork
from fedlens.engines.shared_memory import SharedBuffer, leaves, num_bytes, trees_of
from fedlens.engines.worker import Answer, Begin, Predicting, Training, Worker
from fedlens.work import Shared, Work

UPLOADS = 512 * 2**20  # bytes of uploads that may wait to be added up

VERSIONS = 16  # of the model, that memory is set apart for; what does not fit crosses pipes

Task = Callable[[int, SharedBuffer], Training | Predicting]
"""What a worker is to do, once it is known which slot it has."""


class Sizes(NamedTuple):
    """How much memory is shared: bytes of the model, and slots for what clients get and send."""

    model_bytes: int
    slot_bytes: int
    num_slots: int
    clients_a_slot: int

    @classmethod
    def of(
        cls,
        program: ClientProgram,
        shared: Shared,
        work: Work,
        num_workers: int,
        num_devices: int,
    ) -> Sizes:
        """A first guess by what is known before anyone has sent anything.

        What an algorithm sends besides is taken to be as much as it tells or as clients remember.
        Should an answer not fit, it crosses the pipe, and the next pool has larger slots.
        """
        remembered = sum(map(num_bytes, leaves(work.memory[0])))
        integers = [b for b in shared.buffers.values() if not b.is_floating_point()]
        sent = sum(map(num_bytes, (*shared.exact.values(), *integers)))
        once = 2 * (remembered + sum(map(num_bytes, leaves(shared.told)))) + 4096
        each = 2 * remembered + 64  # what goes in stays there until what comes out is written
        if program.algorithm.sums_parts:
            once += sent
        else:
            each += sent
        clients = max(min(len(work), UPLOADS // each), 1) if num_devices else 1
        slot_bytes = once + clients * each
        num_slots = max(2 * num_workers, min(len(work), UPLOADS // slot_bytes))
        model_bytes = sum(map(num_bytes, leaves(trees_of(shared))))
        pace = program.algorithm.pace
        if pace is not None:  # clients start from several versions; unused memory takes no room
            model_bytes *= min(pace.buffer, VERSIONS)
        return cls(model_bytes, slot_bytes, num_slots, clients)

    def grown(self, needed: int) -> Sizes:
        """With slots that hold what did not fit, and a little more."""
        slot_bytes = max(self.slot_bytes, needed + needed // 8)
        fewer = max(self.num_slots * self.slot_bytes // slot_bytes, 2)
        return self._replace(slot_bytes=slot_bytes, num_slots=max(fewer, self.num_slots // 4))


class Pool:
    def __init__(
        self,
        program: ClientProgram,
        sizes: Sizes,
        workers: Sequence[Callable[[SharedBuffer, list[SharedBuffer]], Worker]],
        devices: Sequence[torch.device],
    ) -> None:
        if any(device.type == "cuda" for device in devices):
            check_unused()
        self.program, self.sizes = program, sizes
        self.model = SharedBuffer(sizes.model_bytes)
        self.slots = [SharedBuffer(sizes.slot_bytes) for _ in range(sizes.num_slots)]
        self.costs = Costs()
        self.busy_seconds = 0.0
        self.most_answered = 0  # bytes that an answer took, or would have
        self._bytes: dict[Any, int] = {}  # by worker
        self._pipes: list[Connection] = []
        self._processes = []
        context = multiprocessing.get_context("fork")
        for make in workers:
            ours, theirs = context.Pipe()
            self._pipes.append(ours)
            arguments = make(self.model, self.slots), theirs, list(self._pipes)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            fork(process)
            theirs.close()
            self._processes.append(process)

    @property
    def most_bytes(self) -> int:
        """What all workers together have had: see `Answer.most_bytes`."""
        return sum(self._bytes.values())

    @property
    def slot_is_too_small(self) -> bool:
        return self.most_answered > self.sizes.slot_bytes

    def begin_training(self, shared: Shared, work: Work) -> None:
        self._begin(trees_of(shared), replace(work, memory=[{}] * len(work)))

    def begin_predicting(self, model: Tree) -> None:
        self._begin({"model": model})

    def _begin(self, trees: Memory, work: Work | None = None) -> None:
        written = self.model.write(trees)
        message = pickle.dumps(Begin(written.positions, written.rest, work))
        for pipe in self._pipes:
            _send(pipe, message)

    def answers(
        self, tasks: Sequence[Task], order: list[int]
    ) -> Iterator[tuple[Answer, SharedBuffer]]:
        """The answers to tasks, in their order; they are handed out in another one.

        A worker has its next task before it is done with one, so that it need not wait for this
        process; but the last tasks are for those that are done first. A slot is used again as
        soon as the next answer is asked for.
        """
        free = list(range(len(self.slots)))
        given: dict[Any, deque[tuple[int, int]]] = {pipe: deque() for pipe in self._pipes}
        done: dict[int, tuple[Answer, int]] = {}
        turn = 0
        while turn < len(tasks):
            while order and free:
                pipe = min(given, key=lambda one: len(given[one]))
                if len(given[pipe]) >= (2 if len(order) > len(self._pipes) else 1):
                    break
                number, slot = order.pop(0), free.pop()
                _send(pipe, pickle.dumps(tasks[number](slot, self.slots[slot])))
                given[pipe].append((number, slot))
            timeout = None
            if turn in done:
                # One at a time: while it is added up, a worker may have become idle.
                answer, slot = done.pop(turn)
                yield answer, self.slots[slot]
                free.append(slot)
                turn, timeout = turn + 1, 0
            for ready in wait([pipe for pipe, has in given.items() if has], timeout):
                number, slot = given[ready].popleft()
                done[number] = self._receive(ready), slot

    def _receive(self, pipe: Any) -> Answer:
        try:
            answer: Answer = pickle.loads(pipe.recv_bytes())
        except (EOFError, ConnectionError):
            raise _killed() from None
        if answer.error:
            raise RuntimeError(f"a worker process failed: {answer.error}")
        self._bytes[pipe] = answer.most_bytes
        self.most_answered = max(self.most_answered, answer.num_bytes)
        self.busy_seconds += answer.busy
        return answer

    def terminate(self) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()


def _send(pipe: Connection, message: bytes) -> None:
    try:
        pipe.send_bytes(message)
    except ConnectionError:
        raise _killed() from None


def _serve(worker: Worker, pipe: Connection, others: Sequence[Connection]) -> None:
    for other in others:
        other.close()  # else no worker would notice that this process is gone
    worker.serve(pipe)


def _killed() -> ChildProcessError:
    return ChildProcessError(
        "a worker process was killed, perhaps for want of memory: "
        'choose engine = "sequential", or a smaller local.batch_size'
    )
