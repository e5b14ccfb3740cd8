"""The workers of an engine: they get tasks, and their results come back in order.

What differs between local processes and actors of a cluster is how a task is sent, how results
arrive, and what replaces a lost worker.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from fedlens.core import Tree
from fedlens.core.trees import stack
from fedlens.engines.shared_memory import num_bytes
from fedlens.engines.trainer import Predicting, Result, Task, Training
from fedlens.rounds.client import ClientProgram
from fedlens.rounds.engine import Which
from fedlens.rounds.work import Shared, Work

ENOUGH, MOST = 8, 512  # measured tasks: needed for an estimate, and kept


class Costs:
    """The seconds per step and per example, measured as clients train.

    A step has a fixed cost besides its examples, so neither count alone predicts the time.
    """

    def __init__(self) -> None:
        self.seen: deque[tuple[float, float, float]] = deque(maxlen=MOST)

    def learn(self, steps: float, examples: float, seconds: float) -> None:
        self.seen.append((steps, examples, seconds))

    @property
    def are_seconds(self) -> bool:
        """Whether enough tasks were measured to estimate seconds."""
        return len(self.seen) >= ENOUGH

    def of(self, steps: Tensor, examples: Tensor) -> list[float]:  # [C] each
        """The cost of each client: seconds, or its number of examples until enough are measured."""
        if not self.are_seconds:
            return [float(count) for count in examples]
        known = torch.tensor(list(self.seen), dtype=torch.float64)
        # Least squares; this driver also solves rank-deficient problems (all clients alike).
        prices = torch.linalg.lstsq(known[:, :2], known[:, 2:], driver="gelsd").solution
        work = torch.stack([steps, examples], 1).double()
        found: list[float] = (work @ prices.clamp(min=0)).flatten().tolist()
        return found


TRIES = 3  # attempts at a task whose worker is lost
UPLOADS = 512 * 2**20  # bytes of uploads that may wait to be added up
VERSIONS = 16  # of the model that shared memory is reserved for; what does not fit uses pipes


class Sizes(NamedTuple):
    """The sizes of memory: for what a round sends to all, and for slots with a task's tensors."""

    round_bytes: int
    slot_bytes: int
    num_slots: int
    clients_a_slot: int

    @classmethod
    def of(
        cls, program: ClientProgram, shared: Shared, work: Work, num_workers: int, num_devices: int
    ) -> Sizes:
        """A first estimate, before any client has sent anything.

        Uploads besides the model are assumed to be as large as `told` and the clients' memory.
        A result that does not fit is sent through the pipe, and the next slots are larger.
        """
        remembered = num_bytes(work.memory[0])
        sent = num_bytes(shared.exact)
        sent += num_bytes([b for b in shared.buffers.values() if not b.is_floating_point()])
        once = 2 * (remembered + num_bytes(shared.told)) + 4096
        each = 2 * remembered + 64  # the input stays until the output is written
        if program.algorithm.sums_parts:
            once += sent
        else:
            each += sent
        clients = max(min(len(work), UPLOADS // each), 1) if num_devices else 1
        slot_bytes = once + clients * each
        num_slots = max(2 * num_workers, min(len(work), UPLOADS // slot_bytes))
        round_bytes = num_bytes(shared)
        pace = program.algorithm.pace
        if pace is not None:  # clients start from several versions; untouched memory takes no RAM
            round_bytes *= min(pace.buffer, VERSIONS)
        return cls(round_bytes + num_bytes(without_memory(work)), slot_bytes, num_slots, clients)

    def grown(self, needed: int) -> Sizes:
        """The sizes with slots for `needed` bytes, and a little more."""
        slot_bytes = max(self.slot_bytes, needed + needed // 8)
        fewer = max(self.num_slots * self.slot_bytes // slot_bytes, 2)
        return self._replace(slot_bytes=slot_bytes, num_slots=max(fewer, self.num_slots // 4))


class Worker(Protocol):
    given: deque[tuple[int, Any]]  # unanswered tasks, each with its number, oldest first
    most_bytes: int  # see `Result.most_bytes`


W = TypeVar("W", bound=Worker)


class Workers(ABC, Generic[W]):
    """The workers of one program."""

    workers: list[W]
    num_waiting: int  # how many tasks may be in progress or have a result that waits for its turn
    clients_a_task: int  # the most
    short_seconds: float = 0.0
    """Shorter work is merged into one task, since sending a task costs a tenth of this."""

    def __init__(self) -> None:
        self.costs = Costs()
        self.busy_seconds = 0.0  # the computing time of all workers together

    @property
    def num_workers(self) -> int:
        return len(self.workers)

    @property
    def most_bytes(self) -> int:
        """The sum of the peak memory of all workers."""
        return sum(worker.most_bytes for worker in self.workers)

    def train(
        self, shared: Shared, work: Work, blocks: Sequence[slice], order: list[int]
    ) -> Iterator[Result]:
        """Yield the results of `blocks` in their order; tasks are sent in another `order`.

        The tensors of one result may be overwritten when the next is requested.
        """
        self.begin(shared, without_memory(work))
        tasks = [partial(_training, work, rows) for rows in blocks]
        yield from self.results(tasks, order)

    def predict(self, model: Tree, number: int, batches: Sequence[Which]) -> Iterator[Tensor]:
        """Yield the logits of each batch of the example set with this number."""
        self.begin(model, None)
        tasks = [partial(Predicting, number, which) for which in batches]
        for result in self.results(tasks, [*range(len(tasks))]):
            yield result.value.clone()

    def results(self, tasks: Sequence[Callable[[], Task]], order: list[int]) -> Iterator[Result]:
        """Yield the results in the order of `tasks`, which are sent in another `order`.

        A worker gets its next task before it finishes one, so that it does not wait for this
        process; but the last tasks go to the workers that finish first. The tasks of a lost worker
        are sent to others, with the same results.
        """
        done: dict[int, Result] = {}
        lost: Counter[int] = Counter()  # how often a task was lost with its worker
        turn = 0
        while turn < len(tasks):
            in_work = sum(len(worker.given) for worker in self.workers)
            while order and in_work + len(done) < self.num_waiting:
                worker = min(self.workers, key=lambda one: len(one.given))
                if len(worker.given) >= (2 if len(order) > len(self.workers) else 1):
                    break
                number = order.pop(0)
                self.send(worker, number, tasks[number]())
                in_work += 1
            has_come = turn in done
            if has_come:
                # One at a time: a worker may become idle while the caller adds the result up.
                yield done.pop(turn)
                self.release(turn)
                turn += 1
            results, gone = self.receive(waits=not has_come)
            done.update(results)
            for worker in gone:
                numbers = [number for number, _ in worker.given]
                order[:0] = numbers
                lost.update(numbers[:1])  # the task it was working on
                self.replace(worker, lost[numbers[0]])

    def accept(self, result: Result, worker: W) -> Result:
        """Take note of what a result took; raise its error, if it is one."""
        result.check()
        worker.most_bytes = result.most_bytes
        self.busy_seconds += result.busy
        return result

    @abstractmethod
    def begin(self, given: Shared | Tree, work: Work | None) -> None:
        """Send what the next tasks have in common: see `Trainer.begin`."""

    @abstractmethod
    def send(self, worker: W, number: int, task: Task) -> None:
        """Send a task to a worker, and append it to the worker's `given`."""

    @abstractmethod
    def receive(self, waits: bool) -> tuple[Mapping[int, Result], Sequence[W]]:
        """The results that have arrived, by task number, and the workers that are lost.

        If there are none and `waits` is true, it blocks, at least for a while.
        """

    def release(self, number: int) -> None:
        """The result of this task is no longer needed."""
        return

    @abstractmethod
    def replace(self, worker: W, times: int) -> None:
        """Continue without a lost worker; raise an error if its task was lost TRIES times."""

    @abstractmethod
    def stop(self) -> None: ...


def _training(work: Work, rows: slice) -> Training:
    return Training(rows, stack(work.memory[rows]))


def without_memory(work: Work) -> Work:
    return replace(work, memory=[{}] * len(work))
