"""Engines whose clients train in workers: the common part of local processes and of a cluster.

Such an engine divides the cohort into tasks, and its workers do them; their results come back in
the order of the cohort. What differs is how workers are started, how a task is sent, how results
arrive, and what replaces a lost worker.

Uploads are added up in cohort order, two by two (see `uploads.py`). So on CPUs, where one thread
trains each client, the result is the same to the last bit for any number of workers and any
assignment of clients to them. The costs of clients are measured as they train, and the longest
tasks are sent first. On GPUs each worker stacks a block of clients.
"""

from __future__ import annotations

from abc import abstractmethod
from bisect import bisect
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from fedlens.core import Tree
from fedlens.core.federation import Examples
from fedlens.core.trees import stack, tensors_in
from fedlens.engines.trainer import Predicting, Result, Task, Training
from fedlens.network.network import Network
from fedlens.rounds.client import ClientProgram
from fedlens.rounds.engine import Engine, Which
from fedlens.rounds.work import Part, Shared, Work

TASKS = 8  # per worker and round, if there are enough clients: no long wait at the end
ALL_TASKS = 512  # the most in a round, also of many workers, since all results use one link
TRIES = 3  # attempts at a task whose worker is lost
UPLOADS = 512 * 2**20  # bytes of uploads that may wait to be added up
VERSIONS = 16  # of the model that shared memory is reserved for; what does not fit uses pipes
ENOUGH, MOST = 8, 512  # measured tasks: needed for an estimate, and kept


class Worker(Protocol):
    given: deque[tuple[int, Any]]  # unanswered tasks, each with its number, oldest first
    most_bytes: int  # see `Result.most_bytes`


T = TypeVar("T")
W = TypeVar("W", bound=Worker)


class WorkerEngine(Engine, Generic[W]):
    """An engine that divides a cohort among `workers`. `others` are sets that they only predict."""

    workers: list[W]  # none before the first round
    num_waiting: int = 1  # how many tasks may be in progress or have a result that waits
    clients_a_task: int = 1  # the most
    short_seconds: ClassVar[float] = 0.0
    """Shorter work is merged into one task, since sending a task costs a tenth of this."""

    def __init__(
        self,
        network: Network,
        examples: Examples,
        devices: Sequence[torch.device] = (),
        others: Sequence[Examples] = (),
    ) -> None:
        self.network, self.example_sets = network, (examples, *others)
        self.worker_devices = tuple(devices)
        self.workers, self.costs = [], Costs()
        self._most_bytes = 0  # of earlier workers

    @abstractmethod
    def start(self, program: ClientProgram, shared: Shared, work: Work) -> None:
        """Start workers for a round, unless those of the last round can go on."""

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
    def stop(self) -> None:
        """End the workers."""

    @property
    def workers_predict(self) -> bool:
        """Whether workers predict, once they are started: by default if they have devices."""
        return bool(self.worker_devices)

    @property
    def predicts_fast(self) -> bool:
        return True  # as workers do, so that starting them changes nothing

    @property
    def worker_bytes(self) -> int:
        return max(self._most_bytes, sum(worker.most_bytes for worker in self.workers))

    def map(self, program: ClientProgram, shared: Shared, work: Work) -> Iterator[Part]:
        yield from self._closed_on_error(self._train(program, shared, work))

    def _train(self, program: ClientProgram, shared: Shared, work: Work) -> Iterator[Part]:
        """Yield what clients send, task by task in cohort order."""
        self.start(program, shared, work)
        steps, examples = work.plan.steps, work.plan.counts.sum(1)
        costs = self.costs.of(steps, examples)
        if self.worker_devices:
            blocks = even_blocks(steps.tolist(), self.num_workers, self.clients_a_task)
        else:
            share = sum(costs) / self.num_workers
            most_cost = share / tasks_a_worker(self.num_workers)
            if self.costs.are_seconds:
                most_cost = max(most_cost, min(self.short_seconds, share))
            blocks = paired_blocks(costs, most_cost, self.clients_a_task)
        order = longest_first([sum(costs[rows]) for rows in blocks], self.num_waiting)
        self.begin(shared, without_memory(work))
        tasks = [partial(_training, work, rows) for rows in blocks]
        for rows, result in zip(blocks, self.results(tasks, order), strict=True):
            self.costs.learn(float(steps[rows].sum()), float(examples[rows].sum()), result.busy)
            yield result.value.received()

    def predict(
        self, model: Tree, examples: Examples, batches: Sequence[Which]
    ) -> Iterator[Tensor]:
        number = next((n for n, one in enumerate(self.example_sets) if one is examples), None)
        if not self.workers_predict or not self.workers or number is None:
            yield from super().predict(model, examples, batches)
            return
        yield from self._closed_on_error(self._predict(model, number, batches))

    def _predict(self, model: Tree, number: int, batches: Sequence[Which]) -> Iterator[Tensor]:
        self.begin(model, None)
        tasks = [partial(Predicting, number, which) for which in batches]
        for result in self.results(tasks, [*range(len(tasks))]):
            yield result.value.clone()

    def results(self, tasks: Sequence[Callable[[], Task]], order: list[int]) -> Iterator[Result]:
        """Yield the results in the order of `tasks`, which are sent in another `order`.

        The tensors of one result may be overwritten when the next is requested. A worker gets its
        next task before it finishes one, so that it does not wait for this process; but the last
        tasks go to the workers that finish first. The tasks of a lost worker are sent to others,
        with the same results.
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

    def close(self) -> None:
        self._most_bytes = self.worker_bytes
        self.stop()
        self.workers, self.costs = [], Costs()

    def _closed_on_error(self, results: Iterator[T]) -> Iterator[T]:
        """Yield results of workers, with one thread in this process; stop workers on an error."""
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # workers use all cores: more threads here would wait for them
        try:
            yield from results
        except BaseException:
            # Workers may be in the middle of a task: the next `map` starts new ones.
            self.close()
            raise
        finally:
            torch.set_num_threads(threads)


def _training(work: Work, rows: slice) -> Training:
    return Training(rows, stack(work.memory[rows]))


def without_memory(work: Work) -> Work:
    return replace(work, memory=[{}] * len(work))


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


def num_bytes(value: Any) -> int:
    """The bytes that tensors take in a buffer; each is rounded up so that the next is aligned."""
    return sum(-(-tensor.nbytes // 64) * 64 for tensor in tensors_in(value))


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


def tasks_a_worker(num_workers: int) -> int:
    return max(min(TASKS, ALL_TASKS // num_workers), 1)


def paired_blocks(costs: Sequence[float], most_cost: float, most_clients: int) -> list[slice]:
    """The largest allowed blocks of consecutive clients that are subtrees of the sum in `Uploads`.

    A block is halved, where the tournament of the whole cohort is, until it costs no more than
    `most_cost` and has no more than `most_clients`, or is a single client.
    """
    reached = list(accumulate(costs, initial=0.0))

    def halved(first: int, size: int) -> Iterator[slice]:
        end = min(first + size, len(costs))
        if first >= end:
            return
        if end - first == 1 or (
            end - first <= most_clients and reached[end] - reached[first] <= most_cost
        ):
            yield slice(first, end)
        else:
            yield from halved(first, size // 2)
            yield from halved(first + size // 2, size // 2)

    return list(halved(0, 1 << (len(costs) - 1).bit_length()))


def even_blocks(steps: Sequence[int], number: int, most: int) -> list[slice]:
    """`number` blocks of consecutive clients of about equal duration, cut to `most` clients each.

    They depend only on the plan, so that a run can be repeated to the last bit.
    """
    reached = list(accumulate((s + 1 for s in steps), initial=0))  # + 1: sending costs, too
    marks = [reached[-1] * part / number for part in range(1, number)]
    cuts = {0, len(steps)}
    for mark in marks:
        above = bisect(reached, mark)
        cuts.add(min((above - 1, above), key=lambda at: abs(reached[at] - mark)))
    return [
        slice(start, min(start + most, end))
        for first, end in pairwise(sorted(cuts))
        for start in range(first, end, most)
    ]


def longest_first(sizes: Sequence[float], num_slots: int) -> list[int]:
    """The order in which tasks are sent: longest first, so that no long one is left at the end.

    If there are more tasks than slots, they are sorted within groups of half as many as slots: a
    result keeps its slot until the results of all tasks before it have arrived.
    """
    some = len(sizes) if len(sizes) <= num_slots else num_slots // 2
    order: list[int] = []
    for first in range(0, len(sizes), max(some, 1)):
        numbers = range(first, min(first + some, len(sizes)))
        order += sorted(numbers, key=sizes.__getitem__, reverse=True)
    return order
