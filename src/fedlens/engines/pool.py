"""Worker processes that run one program, and the memory they share with this process."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import pickle
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from typing import NamedTuple

import torch

from fedlens.client import ClientProgram
from fedlens.core import Memory, Tree
from fedlens.engines.dispatch import TRIES, answers_in_order
from fedlens.engines.gpus import check_unused, fork
from fedlens.engines.shared_memory import SharedBuffer, leaves, num_bytes, trees_of
from fedlens.engines.worker import Answer, Begin, Predicting, Training, Worker
from fedlens.process_state import is_stopped
from fedlens.work import Shared, Work

BUFFERED = 2**15  # bytes that a pipe buffers if the worker reads nothing
LOOK_SECONDS = 1.0  # between two checks of workers that do not answer
UPLOADS = 512 * 2**20  # bytes of uploads that may wait to be added up

VERSIONS = 16  # of the model that shared memory is reserved for; what does not fit uses pipes

logger = logging.getLogger(__name__)

Task = Callable[[int, SharedBuffer], Training | Predicting]
"""Makes the message for a task from the number and the memory of its slot."""


class Sizes(NamedTuple):
    """The sizes of shared memory: for the model, and for slots with what clients get and send."""

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
        """A first estimate, before any client has sent anything.

        Uploads besides the model are assumed to be as large as `told` and the clients' memory.
        An answer that does not fit is sent through the pipe, and the next pool has larger slots.
        """
        remembered = sum(map(num_bytes, leaves(work.memory[0])))
        integers = [b for b in shared.buffers.values() if not b.is_floating_point()]
        sent = sum(map(num_bytes, (*shared.exact.values(), *integers)))
        once = 2 * (remembered + sum(map(num_bytes, leaves(shared.told)))) + 4096
        each = 2 * remembered + 64  # the input stays until the output is written
        if program.algorithm.sums_parts:
            once += sent
        else:
            each += sent
        clients = max(min(len(work), UPLOADS // each), 1) if num_devices else 1
        slot_bytes = once + clients * each
        num_slots = max(2 * num_workers, min(len(work), UPLOADS // slot_bytes))
        model_bytes = sum(map(num_bytes, leaves(trees_of(shared))))
        pace = program.algorithm.pace
        if pace is not None:  # clients start from several versions; untouched memory takes no RAM
            model_bytes *= min(pace.buffer, VERSIONS)
        return cls(model_bytes, slot_bytes, num_slots, clients)

    def grown(self, needed: int) -> Sizes:
        """The sizes with slots for `needed` bytes, and a little more."""
        slot_bytes = max(self.slot_bytes, needed + needed // 8)
        fewer = max(self.num_slots * self.slot_bytes // slot_bytes, 2)
        return self._replace(slot_bytes=slot_bytes, num_slots=max(fewer, self.num_slots // 4))


class WorkerProcess:
    """A worker process and its unanswered tasks."""

    def __init__(self, worker: Worker, others: Sequence[WorkerProcess]) -> None:
        context = multiprocessing.get_context("fork")
        self.pipe, theirs = context.Pipe()
        self.given: deque[tuple[int, int]] = deque()  # the number of a task, and its slot
        self.most_bytes = 0  # see `Done.most_bytes`
        self.was_stopped = False  # at the last check
        self.missed = False  # whether it missed a message
        ours = [self.pipe, *(other.pipe for other in others)]
        self.process = context.Process(target=_serve, args=(worker, theirs, ours), daemon=True)
        fork(self.process)
        theirs.close()

    def send(self, message: bytes) -> None:
        if len(message) > BUFFERED and self._stands_still():
            self.missed = True  # writing more than the pipe buffers would block
            return
        with contextlib.suppress(OSError):  # it is dead, which `receive` will notice
            self.pipe.send_bytes(message)

    def receive(self) -> Answer | None:
        """Its next answer, or None if it is dead."""
        try:
            answer: Answer = pickle.loads(self.pipe.recv_bytes())
        except (EOFError, OSError):
            return None
        return answer

    def is_stopped(self) -> bool:
        """Whether it is stopped now and was at the last check, or has missed a message.

        One check is not enough: after Ctrl-Z and `fg`, this process may resume before the worker.
        """
        stopped, self.was_stopped = self.was_stopped, self._stands_still()
        return self.missed or (stopped and self.was_stopped)

    def _stands_still(self) -> bool:
        assert self.process.pid is not None
        return is_stopped(self.process.pid)

    def kill(self) -> None:
        self.process.kill()  # SIGTERM would not end a stopped process
        self.process.join()
        self.pipe.close()


class Pool:
    """The workers of one program, and the `Transport` for their tasks. Each task has a slot."""

    def __init__(
        self,
        program: ClientProgram,
        sizes: Sizes,
        make_workers: Sequence[Callable[[SharedBuffer, list[SharedBuffer]], Worker]],
        devices: Sequence[torch.device],
    ) -> None:
        if any(device.type == "cuda" for device in devices):
            check_unused()
        self.program, self.sizes = program, sizes
        self.model = SharedBuffer(sizes.model_bytes)
        self.slots = [SharedBuffer(sizes.slot_bytes) for _ in range(sizes.num_slots)]
        self.busy_seconds = 0.0
        self.most_answered = 0  # bytes of the largest answer, even if it did not fit
        self._make = make_workers
        self._begun = b""  # the last `Begin` that workers were sent, pickled
        self._free: list[int] = []  # slots
        self.workers: list[WorkerProcess] = []
        try:
            for make in make_workers:
                self.workers.append(WorkerProcess(make(self.model, self.slots), self.workers))
        except BaseException:
            self.terminate()
            raise

    @property
    def most_bytes(self) -> int:
        """The sum of the peak memory of all workers: see `Done.most_bytes`."""
        return sum(worker.most_bytes for worker in self.workers)

    @property
    def slot_is_too_small(self) -> bool:
        return self.most_answered > self.sizes.slot_bytes

    def begin_training(self, program: ClientProgram, shared: Shared, work: Work) -> None:
        """Send the inputs of a round; `program` differs from the pool's in numbers alone."""
        numbers = [number for (number,) in program.numbers]  # of the one experiment
        self._begin(trees_of(shared), replace(work, memory=[{}] * len(work)), numbers)

    def begin_predicting(self, model: Tree) -> None:
        self._begin({"model": model})

    def _begin(
        self, trees: Memory, work: Work | None = None, numbers: Sequence[float] | None = None
    ) -> None:
        written = self.model.write(trees)
        self._begun = pickle.dumps(Begin(written.positions, written.rest, work, numbers))
        for worker in self.workers:
            worker.send(self._begun)

    def answers(
        self, tasks: Sequence[Task], order: list[int]
    ) -> Iterator[tuple[Answer, SharedBuffer]]:
        """See `answers_in_order`. A slot is reused as soon as the next answer is requested."""
        self._free = list(range(len(self.slots)))
        for answer, slot in answers_in_order(self, tasks, order):
            yield answer, self.slots[slot]
            self._free.append(slot)

    @property
    def num_waiting(self) -> int:
        return len(self.slots)

    def send(self, worker: WorkerProcess, number: int, task: Task) -> None:
        slot = self._free.pop()
        worker.send(pickle.dumps(task(slot, self.slots[slot])))
        worker.given.append((number, slot))

    def receive(self, waits: bool) -> tuple[dict[int, tuple[Answer, int]], list[WorkerProcess]]:
        busy = {worker.pipe: worker for worker in self.workers if worker.given}
        timeout = LOOK_SECONDS if waits else 0
        ready = [busy[pipe] for pipe in wait(list(busy), timeout)]  # type: ignore[index]
        gone = [] if ready or not waits else [w for w in busy.values() if w.is_stopped()]
        answers = {}
        for worker in ready:
            found = worker.receive()
            if found is None:
                gone.append(worker)
            else:
                number, slot = worker.given.popleft()
                answers[number] = self._accept(found, worker), slot
        return answers, gone

    def _accept(self, answer: Answer, worker: WorkerProcess) -> Answer:
        answer.done.check()
        worker.most_bytes = answer.done.most_bytes
        self.most_answered = max(self.most_answered, answer.num_bytes)
        self.busy_seconds += answer.done.busy
        return answer

    def replace(self, worker: WorkerProcess, times: int) -> None:
        """Fork a new worker in place of a lost one; raise an error after TRIES losses of a task."""
        place = self.workers.index(worker)
        worker.kill()
        self._free += [slot for _, slot in worker.given]
        if times == TRIES:
            raise ChildProcessError(
                f"a worker process was killed {times} times over the same clients, perhaps because "
                'memory ran out: choose engine = "sequential", or a smaller local.batch_size'
            )
        logger.warning("a worker process was killed or stopped: another trains its clients")
        others = [one for one in self.workers if one is not worker]
        self.workers[place] = WorkerProcess(self._make[place](self.model, self.slots), others)
        self.workers[place].send(self._begun)

    def terminate(self) -> None:
        for worker in self.workers:
            worker.kill()


def _serve(worker: Worker, pipe: Connection, others: Sequence[Connection]) -> None:
    for other in others:
        other.close()  # else no worker would notice that the parent has ended
    worker.serve(pipe)
