"""Workers of the engine `ray`: actors, wherever in the cluster they are, and the way to them."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from typing import Any

from torch import Tensor

from fedlens.client import ClientProgram
from fedlens.core import Memory, Tree
from fedlens.engines.actor import Actor, Begun, Known
from fedlens.engines.cluster import alive_nodes
from fedlens.engines.costs import Costs
from fedlens.engines.engine import Which
from fedlens.engines.messages import pack, unpack
from fedlens.engines.pool import Sizes
from fedlens.engines.shared_memory import trees_of
from fedlens.engines.trainer import Done
from fedlens.trees import map_tensors, stack
from fedlens.work import Shared, Work

TRIES = 3  # of a task whose worker is gone
FIRST_SECONDS = 300.0  # until the first worker is there
OTHERS_SECONDS = 10.0  # after it, that are waited for others; who comes later joins later

logger = logging.getLogger(__name__)


class Hired:
    """An actor, and the tasks that it was given and has not answered."""

    def __init__(self, handle: Any, node: str, ready: Any) -> None:
        self.handle, self.node, self.ready = handle, node, ready
        self.given: deque[tuple[int, Any]] = deque()  # the number of a task, and what comes of it
        self.most_bytes = 0  # see `Done.most_bytes`


Ask = Callable[[Any], Any]
"""Gives a task to an actor, and returns the reference of what will come of it."""


class Actors:
    """A `Crew` of actors: one a core, or one a GPU, of every node that lives."""

    def __init__(
        self, ray: Any, known: Known, on_gpus: bool, stacks: bool, most_workers: int | None
    ) -> None:
        self.ray, self.costs = ray, Costs()
        self.on_gpus, self.stacks, self.most_workers = on_gpus, stacks, most_workers
        self.busy_seconds = 0.0
        self.num_lost = 0
        self.num_waiting = self.clients_a_task = 1
        self._known = ray.put(known)
        self._hired: list[Hired] = []
        self._coming: list[Hired] = []
        self._program: ClientProgram | None = None
        self._begun = Begun(0, None, None)  # last

    @property
    def num_workers(self) -> int:
        return len(self._hired)

    @property
    def most_bytes(self) -> int:
        return sum(worker.most_bytes for worker in self._hired)

    def gather(self, program: ClientProgram, shared: Shared, work: Work) -> None:
        """Before a round: hire where nodes have room for more, and take on those who are ready."""
        if program is not self._program:
            self._program = program
            self._begun = self._begun._replace(program=self.ray.put(program))
        self._look_for_more(len(work))
        self._welcome(0.0 if self._hired else FIRST_SECONDS)
        sizes = Sizes.of(program, shared, work, self.num_workers, num_devices=1)
        self.num_waiting, self.clients_a_task = sizes.num_slots, sizes.clients_a_slot

    def _look_for_more(self, most: int) -> None:
        kind = "GPU" if self.on_gpus else "CPU"
        have = Counter(one.node for one in (*self._hired, *self._coming))
        places = [
            [node] * (int(has.get(kind, 0)) - have[node])
            for node, has in alive_nodes(self.ray).items()
        ]
        # One of each node, then another of each: few workers are spread over many nodes.
        spread = [node for turn in zip_longest(*places) for node in turn if node is not None]
        most = min(most, self.most_workers or most)
        for node in spread[: max(most - have.total(), 0)]:
            self._coming.append(self._hire(node))

    def _hire(self, node: str) -> Hired:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        remote = self.ray.remote(Actor).options(
            num_cpus=0 if self.on_gpus else 1,
            num_gpus=1 if self.on_gpus else 0,
            max_restarts=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
        )
        handle = remote.remote(self.on_gpus, self.stacks)
        return Hired(handle, node, handle.know.remote(self._known))

    def _welcome(self, seconds: float) -> None:
        """Take on those of the hired who are ready; wait so long for the first."""
        if not self._coming:
            return
        coming = {one.ready: one for one in self._coming}
        errors = []
        ready, _ = self.ray.wait(list(coming), timeout=seconds)
        if ready and seconds:
            ready, _ = self.ray.wait(list(coming), num_returns=len(coming), timeout=OTHERS_SECONDS)
        elif ready:
            ready, _ = self.ray.wait(list(coming), num_returns=len(coming), timeout=0)
        for one in (coming[reference] for reference in ready):
            self._coming.remove(one)
            try:
                error = self.ray.get(one.ready)
            except self.ray.exceptions.RayError as lost:
                error = _first_line(lost)
            if error:
                errors.append(error)
                self.ray.kill(one.handle)
            else:
                self._hired.append(one)
        if errors and not self._hired:
            raise ValueError(f"no worker could be started on the Ray cluster: {errors[0]}")
        if not self._hired:
            raise ChildProcessError(
                f"no worker of the Ray cluster was free within {seconds:.0f} s: "
                "wait for others, or add nodes"
            )

    def train(
        self, shared: Shared, work: Work, blocks: Sequence[slice], order: list[int]
    ) -> Iterator[Done]:
        self._begin(trees_of(shared))

        def ask(rows: slice, actor: Any) -> Any:
            mine = work.rows(rows)
            message = pack((replace(mine, memory=()), _contiguous(stack(mine.memory))))
            return actor.train.remote(self._begun, message)

        yield from self._answers([partial(ask, rows) for rows in blocks], order)

    def predict(self, model: Tree, number: int, batches: Sequence[Which]) -> Iterator[Tensor]:
        self._begin({"model": model})

        def ask(which: Which, actor: Any) -> Any:
            return actor.predict.remote(self._begun, number, pack(which))

        tasks = [partial(ask, which) for which in batches]
        for done in self._answers(tasks, list(range(len(tasks)))):
            yield done.result.clone()

    def _begin(self, trees: Memory) -> None:
        """Put what tasks have in common where every node finds it; it goes there once."""
        put = self.ray.put(pack(_contiguous(trees)))
        self._begun = self._begun._replace(number=self._begun.number + 1, trees=put)

    def _answers(self, tasks: Sequence[Ask], order: list[int]) -> Iterator[Done]:
        """The answers to tasks, in their order; they are handed out in another one.

        As in `Pool.answers`: a worker has its next task before it is done with one, but for the
        last. What a lost worker was given goes to others: the tasks are the same, and so is what
        comes of them.
        """
        done: dict[int, Done] = {}
        lost: Counter[int] = Counter()  # how often a task was lost with its worker
        turn = 0
        while turn < len(tasks):
            in_work = sum(len(one.given) for one in self._hired)
            while order and in_work + len(done) < self.num_waiting:
                worker = min(self._hired, key=lambda one: len(one.given))
                if len(worker.given) >= (2 if len(order) > len(self._hired) else 1):
                    break
                number = order.pop(0)
                worker.given.append((number, tasks[number](worker.handle)))
                in_work += 1
            timeout = None
            if turn in done:
                yield done.pop(turn)
                turn, timeout = turn + 1, 0
            for worker, number, found in self._received(timeout):
                if found is not None:
                    done[number] = found
                    continue
                numbers = [number for number, _ in worker.given]
                order[:0] = numbers
                lost.update(numbers[:1])  # the one it was at work on
                self._replace(worker, lost[numbers[0]])

    def _received(self, timeout: float | None) -> list[tuple[Hired, int, Done | None]]:
        """Answers that have come; at the end workers that are lost, with None."""
        waited = {
            reference: (worker, number)
            for worker in self._hired
            for number, reference in worker.given
        }
        if not waited:
            return []
        ready, _ = self.ray.wait(list(waited), timeout=timeout)
        if ready:
            ready, _ = self.ray.wait(list(waited), num_returns=len(waited), timeout=0)
        found: list[tuple[Hired, int, Done | None]] = []
        gone: dict[int, Hired] = {}
        for reference in ready:
            worker, number = waited[reference]
            try:
                message, done = self.ray.get(reference)
            except lost_with(self.ray):
                gone[id(worker)] = worker
                continue
            done.check()
            worker.given.remove((number, reference))
            worker.most_bytes = done.most_bytes
            self.busy_seconds += done.busy
            found.append((worker, number, done._replace(result=unpack(message))))
        return found + [(worker, -1, None) for worker in gone.values()]

    def _replace(self, worker: Hired, times: int) -> None:
        """Go on without one that is lost, unless others would go the same way."""
        self._hired.remove(worker)
        self.num_lost += 1
        self.ray.kill(worker.handle)  # only out of reach, it would come back and keep its core
        if times == TRIES:
            raise ChildProcessError(
                f"a worker of the Ray cluster was lost {times} times over the same clients, "
                "perhaps for want of memory: choose a smaller local.batch_size"
            )
        logger.warning("a worker of the Ray cluster was lost: others train its clients")
        if not self._hired:
            self._look_for_more(len(worker.given))
            self._welcome(FIRST_SECONDS)

    def dismiss(self) -> None:
        if not self.ray.is_initialized():
            return
        for worker in (*self._hired, *self._coming):
            self.ray.kill(worker.handle)


def lost_with(ray: Any) -> tuple[type[Exception], ...]:
    """What `ray.get` raises for an answer that will never come, though the cluster lives."""
    found = ray.exceptions
    return found.RayActorError, found.ObjectLostError, found.NodeDiedError, found.OutOfMemoryError


def _contiguous(trees: Any) -> Any:
    return map_tensors(trees, lambda t: t.contiguous())


def _first_line(error: Exception) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
