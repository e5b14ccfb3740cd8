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

import os
import sys
from bisect import bisect
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from fedlens.client import ClientProgram
from fedlens.core import Examples, Tree
from fedlens.engines.engine import Engine, Which
from fedlens.engines.pool import Pool, Sizes
from fedlens.engines.shared_memory import SharedBuffer
from fedlens.engines.worker import Predicting, Training, Worker, received
from fedlens.network.network import Network
from fedlens.trees import stack
from fedlens.work import Part, Shared, Work

T = TypeVar("T")


def num_cores() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


class Processes(Engine):
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
        self._num_workers = len(devices) or workers or num_cores()
        self._most_bytes = 0  # of earlier pools
        self._pool: Pool | None = None

    @property
    def worker_devices(self) -> tuple[torch.device, ...]:
        return self.devices

    @property
    def num_workers(self) -> int:
        return self._num_workers

    @property
    def busy_seconds(self) -> float:
        return self._pool.busy_seconds if self._pool is not None else 0.0

    @property
    def worker_bytes(self) -> int:
        now = self._pool.most_bytes if self._pool is not None else 0
        return max(self._most_bytes, now)

    def map(self, program: ClientProgram, shared: Shared, work: Work) -> Iterator[Part]:
        pool = self._pool
        if pool is None or pool.program is not program or pool.slot_is_too_small:
            sizes = Sizes.of(program, shared, work, self.num_workers, len(self.devices))
            if pool is not None and pool.program is program:
                sizes = sizes.grown(pool.most_answered)  # what clients sent did not fit
            self.close()
            pool = self._pool = self._forked(program, sizes)
        yield from self._watched(self._trained(pool, shared, work))

    def predict(
        self, model: Tree, examples: Examples, batches: Sequence[Which]
    ) -> Iterator[Tensor]:
        """Workers predict if they are there and have other devices than this process."""
        number = next((n for n, known in enumerate(self.known) if known is examples), None)
        if not self.devices or self._pool is None or number is None:
            yield from super().predict(model, examples, batches)
            return
        yield from self._watched(self._predicted(self._pool, model, number, batches))

    def close(self) -> None:
        if self._pool is not None:
            self._most_bytes = self.worker_bytes
            self._pool.terminate()
            self._pool = None

    def _forked(self, program: ClientProgram, sizes: Sizes) -> Pool:
        def worker(device: torch.device, model: SharedBuffer, slots: list[SharedBuffer]) -> Worker:
            return Worker(
                network=self.network,
                known=self.known,
                device=device,
                stacks=bool(self.devices),
                program=program,
                model=model,
                slots=slots,
            )

        devices = self.devices or [torch.device("cpu")] * self.num_workers
        return Pool(program, sizes, [partial(worker, device) for device in devices], devices)

    def _trained(self, pool: Pool, shared: Shared, work: Work) -> Iterator[Part]:
        """What clients send, block by block in cohort order."""
        pool.begin_training(shared, work)
        blocks = [slice(client, client + 1) for client in range(len(work))]
        if self.devices:
            most = pool.sizes.clients_a_slot
            blocks = even_blocks(work.plan.steps.tolist(), len(self.devices), most)
        steps, examples = work.plan.steps, work.plan.counts.sum(1)
        costs = pool.costs.of(steps, examples)

        def task(rows: slice, number: int, slot: SharedBuffer) -> Training:
            written = slot.write(stack(work.memory[rows]))
            return Training(rows, number, written.positions, written.rest)

        tasks = [partial(task, rows) for rows in blocks]
        order = longest_first([sum(costs[rows]) for rows in blocks], len(pool.slots))
        for rows, (answer, slot) in zip(blocks, pool.answers(tasks, order), strict=True):
            pool.costs.learn(float(steps[rows].sum()), float(examples[rows].sum()), answer.busy)
            yield received(answer, slot)

    def _predicted(
        self, pool: Pool, model: Tree, number: int, batches: Sequence[Which]
    ) -> Iterator[Tensor]:
        pool.begin_predicting(model)

        def task(which: Which, slot: int, _: SharedBuffer) -> Predicting:
            return Predicting(number, which)

        tasks = [partial(task, which) for which in batches]
        for answer, _ in pool.answers(tasks, list(range(len(tasks)))):
            yield answer.result

    def _watched(self, results: Iterator[T]) -> Iterator[T]:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # the cores are the workers': more threads here wait for theirs
        try:
            yield from results
        except BaseException:
            # Workers may be in the middle of something: the next map starts with new ones.
            self.close()
            raise
        finally:
            torch.set_num_threads(threads)


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
