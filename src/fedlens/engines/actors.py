"""Workers of the engine `ray`: actors anywhere in the cluster, and how to reach them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedlens.client import ClientProgram
from fedlens.core import Memory, Tree
from fedlens.engines.actor import Actor, ActorInit
from fedlens.engines.actor_group import ActorGroup, RemoteWorker, lost_errors
from fedlens.engines.costs import Costs
from fedlens.engines.dispatch import TRIES, answers_in_order
from fedlens.engines.engine import Which
from fedlens.engines.messages import arrays_of, pack, unpack
from fedlens.engines.pool import Sizes
from fedlens.engines.shared_memory import trees_of
from fedlens.engines.trainer import Done
from fedlens.trees import map_tensors, stack
from fedlens.work import Shared, Work, exact_model

SHORT_SECONDS = 0.015  # see `Workers.short_seconds`: Ray takes about a millisecond for a task

logger = logging.getLogger(__name__)


Ask = Callable[[Any], Any]
"""Sends a task to an actor, and returns the reference of its result."""


class Actors:
    """`Workers` that are actors: one per core, or one per GPU, of every live node.

    This class is also the `Transport` of their tasks.
    """

    def __init__(
        self,
        ray: Any,
        init: ActorInit,
        on_gpus: bool,
        device: torch.device,  # of each actor, among those that it sees
        stacks: bool,
        most_workers: int | None,
    ) -> None:
        self.ray, self.costs, self.short_seconds = ray, Costs(), SHORT_SECONDS
        arguments = device, stacks
        self.group = ActorGroup(ray, Actor, arguments, ray.put(init), on_gpus, most_workers)
        self.busy_seconds = 0.0
        self.num_lost = 0
        self.num_waiting = self.clients_a_task = 1
        self._program: ClientProgram | None = None
        self._trees: Any = None  # what tasks have in common, or its reference

    @property
    def num_workers(self) -> int:
        return len(self.workers)

    @property
    def most_bytes(self) -> int:
        return sum(worker.most_bytes for worker in self.workers)

    def prepare(self, program: ClientProgram, shared: Shared, work: Work) -> None:
        """Before a round: start workers where nodes have room, and use those that are ready."""
        if program is not self._program:
            self._program, self._program_there = program, self.ray.put(program)
        self.group.start(len(work))
        sizes = Sizes.of(program, shared, work, self.num_workers, num_devices=1)
        self.num_waiting, self.clients_a_task = sizes.num_slots, sizes.clients_a_slot

    def train(
        self, shared: Shared, work: Work, blocks: Sequence[slice], order: list[int]
    ) -> Iterator[Done]:
        trees, exact = trees_of(shared), exact_model(shared.params | shared.buffers)
        if all(torch.equal(exact[name], t) for name, t in shared.exact.items()):
            del trees["exact"]  # two thirds of the bytes to send: actors compute it themselves
        self._begin(trees)

        def ask(rows: slice, actor: Any) -> Any:
            mine = work.rows(rows)
            message = pack((replace(mine, memory=()), _contiguous(stack(mine.memory))))
            return actor.train.remote(message)

        yield from answers_in_order(self, [partial(ask, rows) for rows in blocks], order)

    def predict(self, model: Tree, number: int, batches: Sequence[Which]) -> Iterator[Tensor]:
        self._begin({"model": model})

        def ask(which: Which, actor: Any) -> Any:
            return actor.predict.remote(number, pack(which))

        tasks = [partial(ask, which) for which in batches]
        for done in answers_in_order(self, tasks, list(range(len(tasks)))):
            yield done.result.clone()

    def _begin(self, trees: Memory) -> None:
        """Prepare what tasks have in common. If it is large, each node receives it only once."""
        message = pack(_contiguous(trees))
        self._trees = self.ray.put(message) if arrays_of(message) else message

    def _send_common(self, worker: RemoteWorker) -> None:
        """Send a worker what its tasks have in common, unless it already has it."""
        if worker.program is not self._program_there:
            worker.handle.set_program.remote(self._program_there)
            worker.program = self._program_there
        if worker.trees is not self._trees:
            worker.handle.begin.remote(self._trees)
            worker.trees = self._trees

    @property
    def workers(self) -> list[RemoteWorker]:
        return self.group.workers

    def send(self, worker: RemoteWorker, number: int, task: Ask) -> None:
        self._send_common(worker)
        worker.given.append((number, task(worker.handle)))

    def receive(self, waits: bool) -> tuple[dict[int, Done], list[RemoteWorker]]:
        waited = {
            reference: (worker, number)
            for worker in self.workers
            for number, reference in worker.given
        }
        answers: dict[int, Done] = {}
        gone: dict[int, RemoteWorker] = {}
        if not waited:
            return answers, []
        ready, _ = self.ray.wait(list(waited), timeout=None if waits else 0)
        if ready:
            ready, _ = self.ray.wait(list(waited), num_returns=len(waited), timeout=0)
        for reference in ready:
            worker, number = waited[reference]
            try:
                done: Done = unpack(self.ray.get(reference))
            except lost_errors(self.ray):
                gone[id(worker)] = worker
                continue
            done.check()
            worker.given.remove((number, reference))
            worker.most_bytes = done.most_bytes
            self.busy_seconds += done.busy
            answers[number] = done
        return answers, list(gone.values())

    def replace(self, worker: RemoteWorker, times: int) -> None:
        """Continue without a lost worker; raise an error if its task was lost TRIES times."""
        self.num_lost += 1
        self.group.remove(worker)
        if times == TRIES:
            raise ChildProcessError(
                f"a worker of the Ray cluster was lost {times} times over the same clients, "
                "perhaps because memory ran out: choose a smaller local.batch_size"
            )
        logger.warning("a worker of the Ray cluster was lost: others train its clients")
        if not self.workers:
            self.group.start(len(worker.given))

    def stop(self) -> None:
        self.group.stop()


def _contiguous(trees: Any) -> Any:
    return map_tensors(trees, lambda t: t.contiguous())
