"""Distributes the cohort over a Ray cluster: one actor per core, or per GPU, of every node.

The object store of each node holds the examples once for all of its actors, and also the model of
a round. Where `combine` is linear, actors return sums of what clients send. An actor does what
a worker of `processes` does (`trainer.py`), and the result is the same to the last bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch

from fedlens.client import ClientProgram
from fedlens.engines.actor import ActorInit, OnDisk
from fedlens.engines.actors import Actors
from fedlens.engines.cluster import connect, gpus
from fedlens.engines.engine import Engine
from fedlens.engines.messages import arrays_of
from fedlens.engines.worker_engine import WorkerEngine
from fedlens.federation import Examples
from fedlens.network.network import Network
from fedlens.work import Shared, Work


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
