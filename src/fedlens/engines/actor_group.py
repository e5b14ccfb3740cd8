"""Actors of a Ray cluster: one per core, or one per GPU, of every live node."""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from itertools import zip_longest
from typing import Any

from fedlens.engines.cluster import HeadLost, alive_nodes, check_head, first_line
from fedlens.engines.driver import Driver

FIRST_SECONDS = 300.0  # timeout for the first worker
OTHERS_SECONDS = 10.0  # to wait for others after the first; slower ones join later
SILENT_SECONDS = 10.0  # of waiting for the first worker before a warning
LOOK_SECONDS = 1.0  # between two checks for nodes, while there are none
STARTS = 3  # attempts to start workers, if all of them are lost

logger = logging.getLogger(__name__)


class RemoteWorker:
    """An actor and its unanswered tasks."""

    def __init__(self, handle: Any, node: str, set_up: Any, loaded: Any) -> None:
        self.handle, self.node = handle, node
        self.set_up, self.loaded = set_up, loaded  # references of the results of both calls
        self.given: deque[tuple[int, Any]] = deque()  # the number of a task, and a reference
        self.program: Any = None  # the last one that it was sent
        self.common: Any = None  # what its last tasks had in common
        self.most_bytes = 0  # see `Result.most_bytes`


class ActorGroup:
    """Actors of one class. `set_up` and `load` prepare an actor; both return an error line, or "".

    Actors are created with `arguments`; `load` gets `data`, which is a reference. There are at most
    `most_workers` actors.
    """

    def __init__(
        self,
        ray: Any,
        actor: type,
        arguments: tuple[Any, ...],
        data: Any,
        on_gpus: bool,
        most_workers: int | None = None,
    ) -> None:
        self.ray, self.on_gpus, self.most_workers = ray, on_gpus, most_workers
        self.workers: list[RemoteWorker] = []
        self._actor, self._arguments, self._data = ray.remote(actor), arguments, data
        self._driver = ray.put(Driver.here())
        self._starting: list[RemoteWorker] = []
        self._unusable: set[str] = set()  # nodes where no more workers are started

    def start(self, most: int) -> None:
        """Start workers where nodes have room, at most `most` in all, and use those that are ready.

        If none is ready, wait for the first.
        """
        try:
            check_head(self.ray)
        except HeadLost:
            self.ray.shutdown()  # else Ray would end this process, which may be a notebook
            raise
        self._start_more(most)
        mistakes, lost = self._wait_for_started(0.0)
        until, starts, has_said = time.monotonic() + FIRST_SECONDS, 1, False
        while not self.workers:
            left = until - time.monotonic()
            if left <= 0:
                raise ChildProcessError(
                    f"no worker of the Ray cluster was free within {FIRST_SECONDS:.0f} s: "
                    "wait for others, or add nodes"
                )
            if not self._starting:
                if mistakes or (lost and starts == STARTS):
                    why = (mistakes + lost)[0]
                    raise ValueError(f"no worker could be started on the Ray cluster: {why}")
                starts += bool(lost)  # perhaps their nodes were lost, and there are others
                self._start_more(most)
            found = self._wait_for_started(left if has_said else min(left, SILENT_SECONDS))
            mistakes, lost = mistakes + found[0], lost + found[1]
            if not self.workers and not any(found) and not has_said:
                has_said = True
                kind = "GPUs" if self.on_gpus else "cores"
                logger.warning(
                    "waiting for the Ray cluster: its %s are at work, or slow to start", kind
                )
        for mistake in dict.fromkeys(mistakes):
            told = {"once": True}  # every point of a sweep starts workers of its own
            logger.warning("a node of the Ray cluster is not used: %s", mistake, extra=told)

    def _start_more(self, most: int) -> None:
        have = Counter(one.node for one in (*self.workers, *self._starting))
        room = {
            node: n - have[node]
            for node, n in resources_by_node(self.ray, self.on_gpus).items()
            if node not in self._unusable
        }
        # Nodes take turns, so that few workers are spread over many nodes.
        turns = zip_longest(*([node] * number for node, number in room.items()))
        spread = [node for turn in turns for node in turn if node is not None]
        most = min(most, self.most_workers or most)
        for node in spread[: max(most - have.total(), 0)]:
            self._starting.append(self._start_on(node))

    def _start_on(self, node: str) -> RemoteWorker:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        handle = self._actor.options(
            num_cpus=0 if self.on_gpus else 1,
            num_gpus=1 if self.on_gpus else 0,
            max_restarts=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
        ).remote(*self._arguments)
        # The data of `load` may need code that `set_up` provides; an actor runs its calls in order.
        return RemoteWorker(
            handle, node, handle.set_up.remote(self._driver), handle.load.remote(self._data)
        )

    def _wait_for_started(self, seconds: float) -> tuple[list[str], list[str]]:
        """Use the workers that are ready within `seconds`, or soon after the first of them.

        Return what went wrong with others: the errors that they returned, and how they were lost.
        """
        mistakes: list[str] = []
        lost: list[str] = []
        starting = {one.loaded: one for one in self._starting}
        if not starting:
            time.sleep(min(seconds, LOOK_SECONDS))  # until a node may join
            return mistakes, lost
        ready, _ = self.ray.wait(list(starting), timeout=seconds)
        if ready:
            others = OTHERS_SECONDS if seconds else 0.0
            ready, _ = self.ray.wait(list(starting), num_returns=len(starting), timeout=others)
        for one in (starting[reference] for reference in ready):
            self._starting.remove(one)
            try:
                mistake = self.ray.get(one.set_up) or self.ray.get(one.loaded)
            except self.ray.exceptions.RayError as error:
                lost.append(first_line(error))
            else:
                if not mistake:
                    self.workers.append(one)
                    continue
                mistakes.append(mistake)
                self._unusable.add(one.node)
            self.ray.kill(one.handle)
        return mistakes, lost

    def remove(self, worker: RemoteWorker) -> None:
        """Continue without a lost worker."""
        self.workers.remove(worker)
        self.ray.kill(worker.handle)  # if only unreachable, it would come back and keep its core

    def stop(self) -> None:
        if not self.ray.is_initialized():
            return
        for worker in (*self.workers, *self._starting):
            self.ray.kill(worker.handle)


def resources_by_node(ray: Any, on_gpus: bool) -> dict[str, int]:
    """The number of cores, or of GPUs, of each live node."""
    kind = "GPU" if on_gpus else "CPU"
    return {node: int(has.get(kind, 0)) for node, has in alive_nodes(ray).items()}


def lost_errors(ray: Any) -> tuple[type[Exception], ...]:
    """The exceptions of `ray.get` for a result that is lost while the cluster still works."""
    found = ray.exceptions
    return found.RayActorError, found.ObjectLostError, found.NodeDiedError, found.OutOfMemoryError
