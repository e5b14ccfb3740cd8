"""A cohort dealt out to workers that have the program: what is the same wherever they are.

Uploads are added up in cohort order, two by two (see `uploads.py`), so on CPUs, where each client
is trained by one thread, the result is the same to the last bit for any number of workers and
however clients were dealt to them. What clients cost is learnt as they train, and those that take
longest are handed out first. On GPUs each worker stacks a block of clients.
"""

from __future__ import annotations

from abc import abstractmethod
from bisect import bisect
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from fedlens.client import ClientProgram
from fedlens.core import Tree
from fedlens.engines.costs import Costs
from fedlens.engines.engine import Engine, Which
from fedlens.engines.trainer import Done, received
from fedlens.federation import Examples
from fedlens.network.network import Network
from fedlens.work import Part, Shared, Work

T = TypeVar("T")

TASKS = 8  # for each worker in a round, if there are enough clients: no long wait at its end
ALL_TASKS = 512  # in a round: many workers have fewer each, since results cross one link


class Workers(Protocol):
    """Workers that have one program, and the way to them."""

    costs: Costs

    @property
    def busy_seconds(self) -> float:
        """Of all of them together."""
        ...

    @property
    def num_workers(self) -> int: ...

    @property
    def num_waiting(self) -> int:
        """How many results may wait for their turn."""
        ...

    @property
    def clients_a_task(self) -> int:
        """At the most."""
        ...

    @property
    def short_seconds(self) -> float:
        """Training that is no task of its own, since to hand one out costs a tenth of that."""
        ...

    @property
    def most_bytes(self) -> int:
        """What all workers together have had: see `Done.most_bytes`."""
        ...

    def train(
        self, shared: Shared, work: Work, blocks: Sequence[slice], order: list[int]
    ) -> Iterator[Done]:
        """What blocks of clients sent, block by block; they are handed out in another order.

        The trees of one may be written over when the next is asked for.
        """
        ...

    def predict(self, model: Tree, number: int, batches: Sequence[Which]) -> Iterator[Tensor]:
        """The logits of batches of the set of examples with this number."""
        ...

    def stop(self) -> None: ...


class WorkerEngine(Engine):
    """An engine whose clients train in workers: `_workers_for` says which, and where they are."""

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
        self._workers: Workers | None = None

    @abstractmethod
    def _workers_for(self, program: ClientProgram, shared: Shared, work: Work) -> Workers:
        """Workers for a round: those of the last, or others."""

    @property
    def worker_devices(self) -> tuple[torch.device, ...]:
        return self.devices

    @property
    def workers_predict(self) -> bool:
        """Whether workers predict, once they are there: they do if this process has no devices."""
        return bool(self.devices)

    @property
    def predicts_fast(self) -> bool:
        return True  # as its workers do: whether there are any changes nothing

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

    def _trained(self, workers: Workers, shared: Shared, work: Work) -> Iterator[Part]:
        """What clients send, block by block in cohort order."""
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
        for rows, done in zip(blocks, workers.train(shared, work, blocks, order), strict=True):
            workers.costs.learn(float(steps[rows].sum()), float(examples[rows].sum()), done.busy)
            yield received(done.result)

    def _closed_on_error(self, results: Iterator[T]) -> Iterator[T]:
        """What workers give, while this process has one thread; after an error they are gone."""
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


def tasks_a_worker(num_workers: int) -> int:
    return max(min(TASKS, ALL_TASKS // num_workers), 1)


def paired_blocks(costs: Sequence[float], most_cost: float, most_clients: int) -> list[slice]:
    """Clients in a row as blocks whose sums stand in the tree of `Uploads`, as large as allowed.

    A block is halved, where a tournament of the whole cohort has its halves, until it costs no
    more than `most_cost` and has no more than `most_clients`.
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
