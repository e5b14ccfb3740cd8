"""Distributes a cohort to workers: the common part for local and remote workers.

Uploads are added up in cohort order, two by two (see `uploads.py`). So on CPUs, where one thread
trains each client, the result is the same to the last bit for any number of workers and any
assignment of clients to them. The costs of clients are measured as they train, and the longest
tasks are sent first. On GPUs each worker stacks a block of clients.
"""

from __future__ import annotations

from abc import abstractmethod
from bisect import bisect
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor

from fedlens.core import Tree
from fedlens.core.federation import Examples
from fedlens.engines.workers import Workers
from fedlens.network.network import Network
from fedlens.rounds.client import ClientProgram
from fedlens.rounds.engine import Engine, Which
from fedlens.rounds.work import Part, Shared, Work

T = TypeVar("T")

TASKS = 8  # per worker and round, if there are enough clients: no long wait at the end
ALL_TASKS = 512  # the most in a round, also of many workers, since all results use one link


class WorkerEngine(Engine):
    """An engine whose clients train in workers, which `_workers_for` provides."""

    def __init__(
        self,
        network: Network,
        examples: Examples,
        devices: Sequence[torch.device] = (),
        others: Sequence[Examples] = (),
    ) -> None:
        self.network, self.example_sets = network, (examples, *others)
        self.devices = tuple(devices)
        self._most_bytes = 0  # of earlier workers
        self._workers: Workers[Any] | None = None

    @abstractmethod
    def _workers_for(self, program: ClientProgram, shared: Shared, work: Work) -> Workers[Any]:
        """The workers for a round: those of the last round, or new ones."""

    @property
    def worker_devices(self) -> tuple[torch.device, ...]:
        return self.devices

    @property
    def workers_predict(self) -> bool:
        """Whether workers predict, once they are started: by default if they have devices."""
        return bool(self.devices)

    @property
    def predicts_fast(self) -> bool:
        return True  # as workers do, so that starting them changes nothing

    @property
    def busy_seconds(self) -> float:
        return self._workers.busy_seconds if self._workers is not None else 0.0

    @property
    def worker_bytes(self) -> int:
        now = self._workers.most_bytes if self._workers is not None else 0
        return max(self._most_bytes, now)

    def map(self, program: ClientProgram, shared: Shared, work: Work) -> Iterator[Part]:
        workers = self._workers = self._workers_for(program, shared, work)
        yield from self._closed_on_error(self._trained(workers, shared, work))

    def predict(
        self, model: Tree, examples: Examples, batches: Sequence[Which]
    ) -> Iterator[Tensor]:
        number = next((n for n, one in enumerate(self.example_sets) if one is examples), None)
        if not self.workers_predict or self._workers is None or number is None:
            yield from super().predict(model, examples, batches)
            return
        yield from self._closed_on_error(self._workers.predict(model, number, batches))

    def close(self) -> None:
        if self._workers is not None:
            self._most_bytes = self.worker_bytes
            self._workers.stop()
            self._workers = None

    def _trained(self, workers: Workers[Any], shared: Shared, work: Work) -> Iterator[Part]:
        """Yield what clients send, block by block in cohort order."""
        steps, examples = work.plan.steps, work.plan.counts.sum(1)
        costs = workers.costs.of(steps, examples)
        if self.devices:
            blocks = even_blocks(steps.tolist(), workers.num_workers, workers.clients_a_task)
        else:
            share = sum(costs) / workers.num_workers
            most_cost = share / tasks_a_worker(workers.num_workers)
            if workers.costs.are_seconds:
                most_cost = max(most_cost, min(workers.short_seconds, share))
            blocks = paired_blocks(costs, most_cost, workers.clients_a_task)
        order = longest_first([sum(costs[rows]) for rows in blocks], workers.num_waiting)
        for rows, result in zip(blocks, workers.train(shared, work, blocks, order), strict=True):
            workers.costs.learn(float(steps[rows].sum()), float(examples[rows].sum()), result.busy)
            yield result.value.received()

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
