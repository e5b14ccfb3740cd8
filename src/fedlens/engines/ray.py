"""Distributes the cohort over a Ray cluster: one actor per core, or per GPU, of every node.

The object store of each node holds the examples once for all of its actors, and also the model of
a round. Where `combine` is linear, actors return sums of what clients send. An actor does what
a worker of `processes` does (`trainer.py`), and the result is the same to the last bit.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from fedlens.core import Tree
from fedlens.core.federation import Examples
from fedlens.core.trees import map_tensors
from fedlens.engines.actor import Actor, ActorInit, OnDisk
from fedlens.engines.actor_group import ActorGroup, RemoteWorker, lost_errors
from fedlens.engines.cluster import connect, gpus
from fedlens.engines.messages import arrays_of, pack, unpack
from fedlens.engines.trainer import Result, Task
from fedlens.engines.worker_engine import WorkerEngine
from fedlens.engines.workers import TRIES, Sizes, Workers
from fedlens.network.network import Network
from fedlens.rounds.client import ClientProgram
from fedlens.rounds.engine import Engine
from fedlens.rounds.work import Shared, Work, exact_model

SHORT_SECONDS = 0.015  # see `Workers.short_seconds`: Ray takes about a millisecond for a task

logger = logging.getLogger(__name__)


def ray(
    network: Network,
    examples: Examples,
    devices: Sequence[torch.device],
    others: Sequence[Examples],
    on_disk: OnDisk | None,
) -> Engine:
    """Actors on the nodes of a Ray cluster."""
    return Ray(network, examples, devices=devices, others=others, on_disk=on_disk)


class Ray(WorkerEngine):
    """One actor per GPU if `devices` are GPUs, else one per core; at most `workers` actors.

    Images that are `on_disk` are not sent: each actor opens them on its own machine.
    """

    name: ClassVar[str] = "ray"

    def __init__(
        self,
        network: Network,
        examples: Examples,
        workers: int | None = None,
        devices: Sequence[torch.device] = (),
        others: Sequence[Examples] = (),
        on_disk: OnDisk | None = None,
    ) -> None:
        super().__init__(network, examples, devices, others)
        self.on_gpus = any(device.type == "cuda" for device in devices)
        # Ray shows each actor only its own GPU.
        self._device = torch.device("cuda", 0) if self.on_gpus else torch.device("cpu")
        self._most_workers = workers if self.on_gpus else len(devices) or workers
        self._on_disk = on_disk
        self._num_lost = 0  # of earlier `Actors`

    def of_one_worker(self) -> Ray:
        """An engine for the same clients that has one worker."""
        examples, *others = self.example_sets
        return Ray(self.network, examples, 1, self.devices, others, self._on_disk)

    def device_name(self, device: torch.device) -> str:
        return gpus()[device.index].name

    @property
    def num_workers(self) -> int:
        return self._workers.num_workers if self._workers is not None else 1

    @property
    def num_lost(self) -> int:
        now = self._workers.num_lost if isinstance(self._workers, Actors) else 0
        return self._num_lost + now

    def close(self) -> None:
        self._num_lost = self.num_lost
        super().close()

    def _workers_for(self, program: ClientProgram, shared: Shared, work: Work) -> Actors:
        workers = self._workers
        if not isinstance(workers, Actors):
            init = ActorInit.of(self.network, self.example_sets, self._on_disk)
            ray = connect(sum(t.nbytes for message in init.examples for t in arrays_of(message)))
            stacks, most = bool(self.devices), self._most_workers
            workers = Actors(ray, init, self.on_gpus, self._device, stacks, most)
            self._workers = workers
        workers.prepare(program, shared, work)
        return workers


class Actors(Workers[RemoteWorker]):
    """Workers that are actors: one per core, or one per GPU, of every live node."""

    num_waiting = clients_a_task = 1
    short_seconds = SHORT_SECONDS

    def __init__(
        self,
        ray: Any,
        init: ActorInit,
        on_gpus: bool,
        device: torch.device,  # of each actor, among those that it sees
        stacks: bool,
        most_workers: int | None,
    ) -> None:
        super().__init__()
        self.ray, self.num_lost = ray, 0
        arguments = device, stacks
        self.group = ActorGroup(ray, Actor, arguments, ray.put(init), on_gpus, most_workers)
        self.workers = self.group.workers
        self._program: ClientProgram | None = None
        self._common: Any = None  # what tasks have in common, or its reference

    def prepare(self, program: ClientProgram, shared: Shared, work: Work) -> None:
        """Before a round: start workers where nodes have room, and use those that are ready."""
        if program is not self._program:
            self._program, self._program_there = program, self.ray.put(program)
        self.group.start(len(work))
        sizes = Sizes.of(program, shared, work, self.num_workers, num_devices=1)
        self.num_waiting, self.clients_a_task = sizes.num_slots, sizes.clients_a_slot

    def begin(self, given: Shared | Tree, work: Work | None) -> None:
        """Prepare what tasks have in common. If it is large, each node receives it only once."""
        if isinstance(given, Shared):
            exact = exact_model(given.params | given.buffers)
            if all(torch.equal(exact[name], t) for name, t in given.exact.items()):
                given = given._replace(exact={})  # two thirds of the bytes: actors compute it
        message = pack(map_tensors((given, work), torch.Tensor.contiguous))
        self._common = self.ray.put(message) if arrays_of(message) else message

    def send(self, worker: RemoteWorker, number: int, task: Task) -> None:
        """Send a task, and before it what its worker lacks of the program and the round."""
        if worker.program is not self._program_there:
            worker.handle.set_program.remote(self._program_there)
            worker.program = self._program_there
        if worker.common is not self._common:
            worker.handle.begin.remote(self._common)
            worker.common = self._common
        message = pack(map_tensors(task, torch.Tensor.contiguous))
        worker.given.append((number, worker.handle.do.remote(message)))

    def receive(self, waits: bool) -> tuple[dict[int, Result], list[RemoteWorker]]:
        waited = {
            reference: (worker, number)
            for worker in self.workers
            for number, reference in worker.given
        }
        results: dict[int, Result] = {}
        gone: dict[int, RemoteWorker] = {}
        if not waited:
            return results, []
        ready, _ = self.ray.wait(list(waited), timeout=None if waits else 0)
        if ready:
            ready, _ = self.ray.wait(list(waited), num_returns=len(waited), timeout=0)
        for reference in ready:
            worker, number = waited[reference]
            try:
                result: Result = unpack(self.ray.get(reference))
            except lost_errors(self.ray):
                gone[id(worker)] = worker
                continue
            worker.given.remove((number, reference))
            results[number] = self.accept(result, worker)
        return results, list(gone.values())

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
