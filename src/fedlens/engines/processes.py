"""Distributes the cohort to local processes: one per core (the default on a CPU), or per GPU.

Workers are forked once, so they have the model, the program and the examples without a copy.
From then on only small messages go through pipes: models and uploads are in shared memory.

With `devices` each worker has the examples on its device, and the server works on the CPU. Only a
process that has not used a GPU itself can fork such a worker.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from fedlens.client import ClientProgram
from fedlens.core import Tree
from fedlens.engines.costs import Costs
from fedlens.engines.engine import Engine, Which
from fedlens.engines.gpus import gpu_names
from fedlens.engines.pool import Pool, Sizes
from fedlens.engines.shared_memory import SharedBuffer
from fedlens.engines.trainer import Done, Trainer
from fedlens.engines.worker import Predicting, Training, Worker, sent_by
from fedlens.engines.worker_engine import WorkerEngine
from fedlens.federation import Examples
from fedlens.network.network import Network
from fedlens.trees import stack
from fedlens.work import Shared, Work


def num_cores() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def processes(
    network: Network,
    examples: Examples,
    devices: Sequence[torch.device],
    others: Sequence[Examples],
    _: object,
) -> Engine:
    """Worker processes, one for each CPU core or GPU: the default on a CPU with several cores."""
    return Processes(network, examples, devices=devices, others=others)


class Processes(WorkerEngine):
    """Trains in `workers` processes of one thread, or in one process for each of the `devices`.

    `others` are example sets that no client trains on, but that workers predict.
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
            raise ValueError(
                'engine "processes" needs Linux, which lets PyTorch be forked: choose engine = '
                '"auto", or "ray" for several cores'
            )
        super().__init__(network, examples, devices, others)
        self._num_workers = len(devices) or workers or num_cores()

    def with_examples(self, others: Sequence[Examples]) -> Processes:
        """The same engine, whose workers also predict these examples."""
        examples, *before = self.example_sets
        workers = None if self.devices else self.num_workers
        return Processes(self.network, examples, workers, self.devices, [*before, *others])

    @property
    def num_workers(self) -> int:
        return self._num_workers

    @property
    def workers_predict(self) -> bool:
        # On a CPU each worker has one thread. The threads of one operation wait for each other.
        return bool(self.devices) or self.num_workers > 1

    def device_name(self, device: torch.device) -> str:
        return gpu_names()[device.index]  # this process must not query the GPU

    def _workers_for(self, program: ClientProgram, shared: Shared, work: Work) -> ForkedWorkers:
        workers = self._workers
        assert workers is None or isinstance(workers, ForkedWorkers)
        fits = workers is not None and program.differs_in_numbers_alone(workers.pool.program)
        if workers is not None and fits and not workers.pool.slot_is_too_small:
            workers.program = program  # its numbers are sent with the work
            return workers
        sizes = Sizes.of(program, shared, work, self.num_workers, len(self.devices))
        if workers is not None and fits:
            sizes = sizes.grown(workers.pool.most_answered)  # what clients sent did not fit
        self.close()

        def worker(device: torch.device, model: SharedBuffer, slots: list[SharedBuffer]) -> Worker:
            sets, stacks = self.example_sets, bool(self.devices)
            return Worker(Trainer(self.network, sets, device, stacks, program), model, slots)

        devices = self.devices or [torch.device("cpu")] * self.num_workers
        pool = Pool(program, sizes, [partial(worker, device) for device in devices], devices)
        return ForkedWorkers(pool, len(devices), program)


class ForkedWorkers:
    """The processes of a pool as `Workers` of the engine."""

    def __init__(self, pool: Pool, num_workers: int, program: ClientProgram) -> None:
        self.pool, self.num_workers, self.program = pool, num_workers, program
        self.costs, self.short_seconds = Costs(), 0.0
        self.num_waiting, self.clients_a_task = len(pool.slots), pool.sizes.clients_a_slot

    @property
    def busy_seconds(self) -> float:
        return self.pool.busy_seconds

    @property
    def most_bytes(self) -> int:
        return self.pool.most_bytes

    def train(
        self, shared: Shared, work: Work, blocks: Sequence[slice], order: list[int]
    ) -> Iterator[Done]:
        self.pool.begin_training(self.program, shared, work)

        def task(rows: slice, number: int, slot: SharedBuffer) -> Training:
            written = slot.write(stack(work.memory[rows]))
            return Training(rows, number, written.positions, written.rest)

        tasks = [partial(task, rows) for rows in blocks]
        for answer, slot in self.pool.answers(tasks, order):
            yield Done(sent_by(answer, slot), answer.done.busy)

    def predict(self, model: Tree, number: int, batches: Sequence[Which]) -> Iterator[Tensor]:
        self.pool.begin_predicting(model)

        def task(which: Which, slot: int, _: SharedBuffer) -> Predicting:
            return Predicting(number, which)

        tasks = [partial(task, which) for which in batches]
        for answer, _ in self.pool.answers(tasks, list(range(len(tasks)))):
            yield answer.result

    def stop(self) -> None:
        self.pool.terminate()
