"""Distributes the cohort to local processes: one per core (the default on a CPU), or per GPU.

Workers are forked once, so they have the model, the program and the examples without a copy.
From then on only small messages go through pipes: models and uploads are in shared memory.

With `devices` each worker has the examples on its device, and the server works on the CPU. Only a
process that has not used a GPU itself can fork such a worker.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import multiprocessing
import os
import pickle
import sys
from collections import deque
from collections.abc import Sequence
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from fedlens.core import Tree
from fedlens.core.federation import Examples
from fedlens.core.trees import map_tensors
from fedlens.engines.gpus import check_unused, fork, forked, gpu_names
from fedlens.engines.trainer import Result, Task, Trained, Trainer
from fedlens.engines.workers import TRIES, Sizes, WorkerEngine, num_bytes
from fedlens.network.network import Network
from fedlens.rounds.client import ClientProgram
from fedlens.rounds.engine import Engine
from fedlens.rounds.work import Shared, Work
from fedlens.storage.free_memory import num_cores
from fedlens.storage.process_state import is_stopped

BUFFERED = 2**15  # bytes that a pipe buffers if the worker reads nothing
LOOK_SECONDS = 1.0  # between two checks of workers that do not answer

logger = logging.getLogger(__name__)


def processes(
    network: Network,
    examples: Examples,
    devices: Sequence[torch.device],
    others: Sequence[Examples],
    _: object,
) -> Engine:
    """Worker processes, one for each CPU core or GPU: the default on a CPU with several cores."""
    return Processes(network, examples, devices=devices, others=others)


class Processes(WorkerEngine["WorkerProcess"]):
    """Trains in `workers` processes of one thread, or in one process for each of the `devices`.

    `others` are example sets that no client trains on, but that workers predict. Each task has a
    slot in the memory that workers share with this process.
    """

    name: ClassVar[str] = "processes"
    num_workers: int = 0

    def __init__(
        self,
        network: Network,
        examples: Examples,
        workers: int | None = None,
        devices: Sequence[torch.device] = (),
        others: Sequence[Examples] = (),
    ) -> None:
        if sys.platform != "linux":
            raise ValueError(
                'engine "processes" needs Linux, which lets PyTorch be forked: choose engine = '
                '"auto", or "ray" for several cores'
            )
        super().__init__(network, examples, devices, others)
        self.num_workers = len(devices) or workers or num_cores()
        self._program: ClientProgram | None = None  # of the last round
        self._slots: list[SharedBuffer] = []

    @property
    def workers_predict(self) -> bool:
        # On a CPU each worker has one thread. The threads of one operation wait for each other.
        return bool(self.worker_devices) or self.num_workers > 1

    def device_name(self, device: torch.device) -> str:
        return gpu_names()[device.index]  # this process must not query the GPU

    @property
    def slot_is_too_small(self) -> bool:
        return self._most_sent > self.sizes.slot_bytes

    def start(self, program: ClientProgram, shared: Shared, work: Work) -> None:
        before = self._program if self.workers else None
        fits = before is not None and program.differs_in_numbers_alone(before)
        if not fits or self.slot_is_too_small:
            sizes = Sizes.of(program, shared, work, self.num_workers, len(self.worker_devices))
            if fits:
                sizes = sizes.grown(self._most_sent)  # what clients sent did not fit
            self.close()
            self._fork(program, sizes)
        self._program = program  # its numbers are sent with the work

    def _fork(self, program: ClientProgram, sizes: Sizes) -> None:
        if any(device.type == "cuda" for device in self.worker_devices):
            check_unused()
        self.sizes = sizes
        self.num_waiting, self.clients_a_task = sizes.num_slots, sizes.clients_a_slot
        self._round = SharedBuffer(sizes.round_bytes)
        self._slots = [SharedBuffer(sizes.slot_bytes) for _ in range(sizes.num_slots)]
        self._most_sent = 0  # bytes of the largest result of training, even if it did not fit
        self._begun = b""  # the last `Begin` that workers were sent, pickled
        self._free = [*range(sizes.num_slots)]
        self._slot_of: dict[int, int] = {}  # of tasks whose result is in use
        stacks = bool(self.worker_devices)
        for device in self.worker_devices or [torch.device("cpu")] * self.num_workers:
            trainer = Trainer(self.network, self.example_sets, device, stacks, program)
            self.workers.append(self._forked(trainer, self.workers))

    def _forked(self, trainer: Trainer, others: Sequence[WorkerProcess]) -> WorkerProcess:
        return WorkerProcess(trainer, self._round, self._slots, others)

    def begin(self, given: Shared | Tree, work: Work | None) -> None:
        assert self._program is not None
        numbers = [number for (number,) in self._program.numbers]  # of the one experiment
        self._begun = pickle.dumps(Begin(self._round.write((given, work)).value, numbers))
        for worker in self.workers:
            worker.send(self._begun)

    def send(self, worker: WorkerProcess, number: int, task: Task) -> None:
        slot = self._free.pop()
        worker.send(pickle.dumps(Given(slot, self._slots[slot].write(task))))
        worker.given.append((number, slot))

    def receive(self, waits: bool) -> tuple[dict[int, Result], list[WorkerProcess]]:
        busy = {worker.pipe: worker for worker in self.workers if worker.given}
        timeout = LOOK_SECONDS if waits else 0
        ready = [busy[pipe] for pipe in wait(list(busy), timeout)]  # type: ignore[index]
        gone = [] if ready or not waits else [w for w in busy.values() if w.is_stopped()]
        results = {}
        for worker in ready:
            found = worker.receive()
            if found is None:
                gone.append(worker)
                continue
            number, slot = worker.given.popleft()
            value, end = self.accept(found, worker).value
            if isinstance(value, Trained):
                self._most_sent = max(self._most_sent, end)
            results[number] = found._replace(value=self._slots[slot].read(value))
            self._slot_of[number] = slot
        return results, gone

    def release(self, number: int) -> None:
        self._free.append(self._slot_of.pop(number))

    def replace(self, worker: WorkerProcess, times: int) -> None:
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
        self.workers[place] = self._forked(worker.trainer, others)
        self.workers[place].send(self._begun)

    def stop(self) -> None:
        for worker in self.workers:
            worker.kill()
        self._slots = []  # what is in use of their memory stays until it is not


class Begin(NamedTuple):
    """What the following tasks have in common. The worker sends no answer to it."""

    given: Any  # see `Trainer.begin`, with places in the memory of the round
    numbers: Sequence[float]  # of the program in this round


class Given(NamedTuple):
    """A task, and the slot for its tensors and those of its result."""

    slot: int
    task: Written


class WorkerProcess:
    """A worker process and its unanswered tasks.

    The trainer is made before the fork, so the process has all of it without a copy.
    """

    def __init__(
        self,
        trainer: Trainer,
        round: SharedBuffer,
        slots: Sequence[SharedBuffer],
        others: Sequence[WorkerProcess],
    ) -> None:
        context = multiprocessing.get_context("fork")
        self.trainer = trainer
        self.pipe, theirs = context.Pipe()
        self.given: deque[tuple[int, int]] = deque()  # the number of a task, and its slot
        self.most_bytes = 0  # see `Result.most_bytes`
        self.was_stopped = False  # at the last check
        self.missed = False  # whether it missed a message
        ours = [self.pipe, *(other.pipe for other in others)]
        arguments = (trainer, round, slots, theirs, ours)
        self.process = context.Process(target=_serve, args=arguments, daemon=True)
        fork(self.process)
        theirs.close()

    def send(self, message: bytes) -> None:
        if len(message) > BUFFERED and self._stands_still():
            self.missed = True  # writing more than the pipe buffers would block
            return
        with contextlib.suppress(OSError):  # it is dead, which `receive` will notice
            self.pipe.send_bytes(message)

    def receive(self) -> Result | None:
        """Its next result, or None if it is dead."""
        try:
            result: Result = pickle.loads(self.pipe.recv_bytes())
        except (EOFError, OSError):
            return None
        return result

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


class Place(NamedTuple):
    """Where a tensor lies in a buffer."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    first: int  # byte


class Written(NamedTuple):
    """A value whose tensors lie in a buffer, as far as there was room."""

    value: Any  # with a `Place` for each of these tensors
    end: int  # the byte after all of its tensors, if there had been room


class SharedBuffer:
    """A block of shared memory. Pages that are never written take no RAM."""

    def __init__(self, size: int) -> None:
        self.memory = torch.frombuffer(mmap.mmap(-1, max(size, 4096)), dtype=torch.uint8)

    def write(self, value: Any, after: int = 0) -> Written:
        """Write the tensors of `value` behind the byte `after`."""
        end = after

        def placed(tensor: Tensor) -> Any:
            nonlocal end
            place = Place(tensor.dtype, tuple(tensor.shape), end)
            end += num_bytes(tensor)
            if end > len(self.memory):
                return tensor.cpu()
            self._at(place).copy_(tensor)
            return place

        return Written(map_tensors(value, placed), end)

    def read(self, value: Any) -> Any:
        """The value that was written. Its tensors are views of this memory."""
        return map_tensors(value, self._at, Place)

    def _at(self, place: Place) -> Tensor:
        size = place.dtype.itemsize * torch.Size(place.shape).numel()
        return self.memory[place.first : place.first + size].view(place.dtype).view(place.shape)


def _serve(
    trainer: Trainer,
    round: SharedBuffer,
    slots: Sequence[SharedBuffer],
    pipe: Connection,
    others: Sequence[Connection],
) -> None:
    """Do tasks until this process is killed."""
    for other in others:
        other.close()  # else no worker would notice that the parent has ended
    forked()
    trainer.configure_process()
    assert trainer.program is not None
    while True:
        try:
            message: Begin | Given = pickle.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            os._exit(0)
        if isinstance(message, Begin):
            trainer.begin(*round.read(message.given))
            trainer.program = trainer.program.with_numbers(message.numbers)
            continue
        slot, (task, end) = slots[message.slot], message.task
        result = trainer.do(slot.read(task), partial(slot.write, after=end))
        try:
            pipe.send_bytes(pickle.dumps(result))
        except ConnectionError:  # the parent was killed, and reads nothing more
            os._exit(0)
