"""Distributes the cohort over a Ray cluster: one actor per core, or per GPU, of every node.

The object store of each node holds the examples once for all of its actors, and also the model of
a round. Where `combine` is linear, actors return sums of what clients send. An actor does what
a worker of `processes` does (`trainer.py`), and the result is the same to the last bit.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from fedlens.core import Tree
from fedlens.core.federation import Examples
from fedlens.core.trees import map_tensors
from fedlens.engines.cluster import HeadLost, alive_nodes, check_head, connect, first_line, gpus
from fedlens.engines.messages import Driver, Message, arrays_of, pack, unpack
from fedlens.engines.trainer import Result, Task, TorchSettings, Trainer
from fedlens.engines.workers import TRIES, Sizes, WorkerEngine
from fedlens.network.network import Network
from fedlens.rounds.client import ClientProgram
from fedlens.rounds.engine import Engine
from fedlens.rounds.work import Shared, Work, exact_model

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


def arrived(ray: Any, references: Collection[Any], timeout: float | None) -> list[Any]:
    """The references whose results are there, after waiting for the first."""
    if not references:
        return []
    ready, _ = ray.wait(list(references), timeout=timeout)
    if ready:  # perhaps there are more
        ready, _ = ray.wait(list(references), num_returns=len(references), timeout=0)
    return list(ready)


def lost_errors(ray: Any) -> tuple[type[Exception], ...]:
    """The exceptions of `ray.get` for a result that is lost while the cluster still works."""
    found = ray.exceptions
    return found.RayActorError, found.ObjectLostError, found.NodeDiedError, found.OutOfMemoryError


class OnDisk(NamedTuple):
    """Images that are not sent: a worker opens them itself, in the data folder of its machine."""

    images: Sequence[Tensor]  # in this process
    open: Callable[[], Sequence[Tensor]]  # opens the same images in a worker


class ActorInit(NamedTuple):
    """What every actor is given before its first task."""

    network: Network
    examples: Message  # of all sets; images that several share, or that are on disk, once or not
    open_images: Callable[[], Sequence[Tensor]] | None
    settings: TorchSettings

    @classmethod
    def of(
        cls, network: Network, examples: Sequence[Examples], on_disk: OnDisk | None
    ) -> ActorInit:
        images, opened = on_disk or ((), None)
        sent = [replace(one, columns={}) for one in examples]
        return cls(network, pack(sent, images), opened, TorchSettings.here())

    def open_examples(self) -> list[Examples]:
        """The example sets; sets that share images in the driver share them here, too."""
        on_disk = self.open_images() if self.open_images is not None else ()
        found: list[Examples] = unpack(self.examples, on_disk)
        return found


class Actor:
    """A `Trainer` that is called through Ray."""

    def __init__(self, device: torch.device, stacks: bool) -> None:
        self.device, self.stacks = device, stacks

    def set_up(self, driver: Driver) -> str:
        return driver.set_up_worker()

    def load(self, init: ActorInit) -> str:
        """Prepare to train; return one line that says what went wrong, or ""."""
        try:
            init.settings.apply()
            examples = init.open_examples()
            self.trainer = Trainer(init.network, examples, self.device, self.stacks)
            self.trainer.configure_process()
        except Exception as error:
            return f"{type(error).__name__}: {error}".splitlines()[0]
        return ""

    def set_program(self, program: ClientProgram) -> None:
        self.trainer.program = program

    def begin(self, message: Message) -> None:
        """Set what the following tasks have in common."""
        given, work = unpack(message)
        if isinstance(given, Shared) and not given.exact:
            given = given._replace(exact=exact_model(given.params | given.buffers))
        self.trainer.begin(given, work)

    def do(self, message: Message) -> Message:
        on_host = partial(map_tensors, fn=lambda t: t.cpu().contiguous())
        return pack(self.trainer.do(unpack(message), on_host))


def ray(
    network: Network,
    examples: Examples,
    devices: Sequence[torch.device],
    others: Sequence[Examples],
    on_disk: OnDisk | None,
) -> Engine:
    """Actors on the nodes of a Ray cluster."""
    return Ray(network, examples, devices=devices, others=others, on_disk=on_disk)


class Ray(WorkerEngine[RemoteWorker]):
    """One actor per GPU if `devices` are GPUs, else one per core; at most `workers` actors.

    They are on every live node. Images that are `on_disk` are not sent: each actor opens them on
    its own machine.
    """

    name: ClassVar[str] = "ray"
    short_seconds: ClassVar[float] = 0.015  # Ray takes about a millisecond for a task

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
        self._group: ActorGroup | None = None
        self._program: ClientProgram | None = None

    def of_one_worker(self) -> Ray:
        """An engine for the same clients that has one worker."""
        examples, *others = self.example_sets
        return Ray(self.network, examples, 1, self.worker_devices, others, self._on_disk)

    def device_name(self, device: torch.device) -> str:
        return gpus()[device.index].name

    @property
    def num_workers(self) -> int:
        return len(self.workers) or 1

    def start(self, program: ClientProgram, shared: Shared, work: Work) -> None:
        """Start workers where nodes have room, and use those that are ready."""
        if self._group is None:
            init = ActorInit.of(self.network, self.example_sets, self._on_disk)
            self.ray = connect(sum(array.nbytes for array in arrays_of(init.examples)))
            arguments = self._device, bool(self.worker_devices)
            data, most = self.ray.put(init), self._most_workers
            self._group = ActorGroup(self.ray, Actor, arguments, data, self.on_gpus, most)
            self.workers = self._group.workers
        if program is not self._program:
            self._program, self._program_there = program, self.ray.put(program)
        self._group.start(len(work))
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
        for reference in arrived(self.ray, waited, timeout=None if waits else 0):
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
        assert self._group is not None
        self.num_lost += 1
        self._group.remove(worker)
        if times == TRIES:
            raise ChildProcessError(
                f"a worker of the Ray cluster was lost {times} times over the same clients, "
                "perhaps because memory ran out: choose a smaller local.batch_size"
            )
        logger.warning("a worker of the Ray cluster was lost: others train its clients")
        if not self.workers:
            self._group.start(len(worker.given))

    def stop(self) -> None:
        if self._group is not None:
            self._group.stop()
        self._group = self._program = None
