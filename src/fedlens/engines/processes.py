"""The cohort dealt out to local processes: one a core (the default on a CPU), or one a GPU.

Workers are forked once, so they have the model, the program and the examples without a copy.
From then on only small messages cross the pipes: models and uploads lie in shared memory.

On a CPU each client is trained by one thread, and uploads are added up in cohort order, so the
result is the same to the last bit for any number of workers. What clients cost is learnt as they
train, and those that take longest are handed out first. With `devices` each worker stacks a
block of clients on its own: it has the examples there, and the server works on the CPU. Such a
worker can only be forked by a process that has not used a GPU itself.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import sys
from bisect import bisect
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise
from multiprocessing.connection import Connection, wait
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from fedlens.client import ClientProgram
from fedlens.core import Examples, Memory, Tree
from fedlens.engines.costs import Costs
from fedlens.engines.engine import Which, predict
from fedlens.engines.gpus import check_unused, fork
from fedlens.engines.shared_memory import Block, leaves, room, trees_of
from fedlens.engines.worker import (
    Answer,
    Begin,
    Predicting,
    Training,
    Worker,
    largest_yet,
    received,
)
from fedlens.network.network import Network
from fedlens.trees import stack
from fedlens.work import Part, Shared, Work

__all__ = ["Processes", "largest_yet", "num_cores"]

UPLOADS = 512 * 2**20  # bytes of uploads that may wait to be added up

T = TypeVar("T")

Task = Callable[[int, Block], Training | Predicting]
"""What a worker is to do, once it is known which slot it has."""


def num_cores() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


class Processes:
    """`workers` processes of one thread, or one for each of the `devices`.

    `others` are examples that no client trains on: with devices, workers can predict these, too.
    """

    name: ClassVar[str] = "processes"

    def __init__(
        self,
        network: Network,
        examples: Examples,
        workers: int | None = None,
        devices: Sequence[torch.device] = (),
        others: Sequence[Examples] = (),
    ) -> None:
        if sys.platform != "linux":
            raise ValueError('engine "processes" needs Linux: choose engine = "sequential"')
        self.network, self.known = network, (examples, *others)
        self.devices = tuple(devices)
        self.workers = len(devices) or workers or num_cores()
        self.worker_bytes = 0  # what all workers together had: see Answer.most_bytes
        self._crew: _Crew | None = None

    def map(self, program: ClientProgram, shared: Shared, work: Work) -> Iterator[Part]:
        if self._crew is None or self._crew.program is not program:
            self.close()
            self._crew = _Crew(self, program, shared, work)
        yield from self._watched(self._crew.trained(shared, work))

    def predict(
        self, model: Tree, examples: Examples, batches: Sequence[Which]
    ) -> Iterator[Tensor]:
        """The logits [B, L] of one batch of examples after another.

        Workers give them if they are there and have other devices than this process.
        """
        number = next((n for n, known in enumerate(self.known) if known is examples), None)
        if not self.devices or self._crew is None or number is None:
            yield from predict(self.network, model, examples, batches)
            return
        yield from self._watched(self._crew.predicted(model, number, batches))

    def _watched(self, results: Iterator[T]) -> Iterator[T]:
        assert self._crew is not None
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # the cores are the workers': more threads here wait for theirs
        try:
            yield from results
            self.worker_bytes = max(self.worker_bytes, sum(self._crew.most_bytes.values()))
        except BaseException:
            # Workers may be in the middle of something: the next map starts with new ones.
            self.close()
            raise
        finally:
            torch.set_num_threads(threads)

    @property
    def busy_seconds(self) -> float:
        """What the workers, all together, have been at work since they were started."""
        return self._crew.busy_seconds if self._crew is not None else 0.0

    def close(self) -> None:
        if self._crew is not None:
            self._crew.dismiss()
            self._crew = None


class _Crew:
    """Workers that know one program, and the memory they share with this process."""

    def __init__(
        self, engine: Processes, program: ClientProgram, shared: Shared, work: Work
    ) -> None:
        if any(device.type == "cuda" for device in engine.devices):
            check_unused()
        self.program, self.num_blocks = program, len(engine.devices)
        remembered = sum(map(room, leaves(work.memory[0])))
        integers = [b for b in shared.buffers.values() if not b.is_floating_point()]
        sent = sum(map(room, (*shared.exact.values(), *integers)))
        # What an algorithm sends besides is about as much as it tells or as clients remember.
        once = 2 * (remembered + sum(map(room, leaves(shared.told)))) + 4096
        each = 2 * remembered + 64  # what goes in stays there until what comes out is written
        if program.algorithm.combine.linear:
            once += sent
        else:
            each += sent
        self.most_clients = 1
        if self.num_blocks:
            self.most_clients = max(min(len(work), UPLOADS // each), 1)
        slot_bytes = once + self.most_clients * each
        num_slots = max(2 * engine.workers, min(len(work), UPLOADS // slot_bytes))
        self.model = Block(sum(map(room, leaves(trees_of(shared)))))
        self.slots = [Block(slot_bytes) for _ in range(num_slots)]
        self.most_bytes: dict[Any, int] = {}  # by worker
        self.busy_seconds = 0.0
        self.costs = Costs()
        self.pipes: list[Connection] = []
        self.processes = []
        context = multiprocessing.get_context("fork")
        for device in engine.devices or [torch.device("cpu")] * engine.workers:
            ours, theirs = context.Pipe()
            self.pipes.append(ours)
            worker = Worker(
                network=engine.network,
                known=engine.known,
                device=device,
                stacks=bool(engine.devices),
                program=program,
                model=self.model,
                slots=self.slots,
            )
            target, arguments = _serve, (worker, theirs, list(self.pipes))
            process = context.Process(target=target, args=arguments, daemon=True)
            fork(process)
            theirs.close()
            self.processes.append(process)

    def trained(self, shared: Shared, work: Work) -> Iterator[Part]:
        """What clients send, block by block in cohort order."""
        self._begin(trees_of(shared), replace(work, memory=[{}] * len(work)))
        blocks = [slice(client, client + 1) for client in range(len(work))]
        if self.num_blocks:
            blocks = even_blocks(work.plan.steps.tolist(), self.num_blocks, self.most_clients)
        steps, examples = work.plan.steps, work.plan.counts.sum(1)
        costs = self.costs.of(steps, examples)

        def task(rows: slice, number: int, slot: Block) -> Training:
            return Training(rows, number, slot.write(stack(work.memory[rows])))

        tasks = [partial(task, rows) for rows in blocks]
        order = longest_first([sum(costs[rows]) for rows in blocks], len(self.slots))
        for rows, (answer, slot) in zip(blocks, self._dealt(tasks, order), strict=True):
            self.costs.learn(float(steps[rows].sum()), float(examples[rows].sum()), answer.busy)
            yield received(answer, slot)

    def predicted(self, model: Tree, examples: int, batches: Sequence[Which]) -> Iterator[Tensor]:
        self._begin({"model": model})

        def task(which: Which, number: int, slot: Block) -> Predicting:
            return Predicting(examples, which)

        tasks = [partial(task, which) for which in batches]
        for answer, _ in self._dealt(tasks, list(range(len(tasks)))):
            yield answer.result

    def _begin(self, trees: Memory, work: Work | None = None) -> None:
        message = pickle.dumps(Begin(self.model.write(trees), work))
        for pipe in self.pipes:
            _send(pipe, message)

    def _dealt(self, tasks: Sequence[Task], order: list[int]) -> Iterator[tuple[Answer, Block]]:
        """The answers to tasks, in their order; they are handed out in another one.

        A worker has its next task before it is done with one, so that it need not wait for this
        process; but the last tasks are for those that are done first. A slot is used again as
        soon as the next answer is asked for.
        """
        free = list(range(len(self.slots)))
        given: dict[Any, deque[tuple[int, int]]] = {pipe: deque() for pipe in self.pipes}
        done: dict[int, tuple[Answer, int]] = {}
        turn = 0
        while turn < len(tasks):
            while order and free:
                pipe = min(given, key=lambda one: len(given[one]))
                if len(given[pipe]) >= (2 if len(order) > len(self.pipes) else 1):
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
            raise _died() from None
        if answer.error:
            raise RuntimeError(f"a worker process failed: {answer.error}")
        self.most_bytes[pipe] = answer.most_bytes
        self.busy_seconds += answer.busy
        return answer

    def dismiss(self) -> None:
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            process.join()
        for pipe in self.pipes:
            pipe.close()


def even_blocks(steps: Sequence[int], number: int, most: int) -> list[slice]:
    """Clients in a row as `number` blocks that take about as long, of `most` clients at the most.

    They depend on nothing but the plan, so that a run can be repeated to the last bit.
    """
    reached = list(accumulate((s + 1 for s in steps), initial=0))  # one more: to send costs, too
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
    """The order in which tasks are handed out: no worker is left with a long one at the end.

    If there are more of them than slots, that holds for some after others: a result keeps its slot
    until those before it, in the order of the tasks, have come.
    """
    some = len(sizes) if len(sizes) <= num_slots else num_slots // 2
    order: list[int] = []
    for first in range(0, len(sizes), max(some, 1)):
        numbers = range(first, min(first + some, len(sizes)))
        order += sorted(numbers, key=sizes.__getitem__, reverse=True)
    return order


def _send(pipe: Connection, message: bytes) -> None:
    try:
        pipe.send_bytes(message)
    except ConnectionError:
        raise _died() from None


def _serve(worker: Worker, pipe: Connection, others: Sequence[Connection]) -> None:
    for other in others:
        other.close()  # else no worker would notice that this process is gone
    worker.serve(pipe)


def _died() -> ChildProcessError:
    return ChildProcessError(
        "a worker process was killed, perhaps for want of memory: "
        'choose engine = "sequential", or a smaller local.batch_size'
    )
