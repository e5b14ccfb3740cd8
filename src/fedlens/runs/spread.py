"""Points of a sweep, spread over a Ray cluster: each core, or each GPU, runs some of them.

An actor runs points as a sweep on one machine does. It writes temporary run folders and reports
each change; this process makes the same changes in the sweep's folder: nodes need not share a disk.
If an actor is lost, another resumes its points from their last checkpoints. On CPUs models are
byte-identical to those of engine `ray` running the points one after another.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import shutil
import sys
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fedlens.config.consent import mistake_of
from fedlens.config.experiment import Experiment, Named, Precision
from fedlens.config.names import EngineName
from fedlens.core.federation import Dataset
from fedlens.core.trees import map_tensors
from fedlens.engines import Ray, Sequential
from fedlens.engines.cluster import HeadLost, connect, own_folder, remove_stale
from fedlens.engines.messages import Driver, Message, arrays_of, pack, unpack
from fedlens.engines.ray import ActorGroup, RemoteWorker, arrived, lost_errors, resources_by_node
from fedlens.engines.trainer import keep_memory
from fedlens.engines.workers import TRIES
from fedlens.runs.folder import Change, RunFolder
from fedlens.runs.manifest import as_it_began, check_settings, check_unchanged, typed_functions
from fedlens.runs.points import Point, build_point, into_stacks, run_stacks, sharing
from fedlens.runs.progress import Watch
from fedlens.runs.records import Record
from fedlens.runs.result import Result
from fedlens.runs.run import check_asked, new_run
from fedlens.storage.files import write_atomically
from fedlens.storage.run_files import (
    CHECKPOINT,
    EXPERIMENT,
    MANIFEST,
    ROUNDS,
    SUMMARY,
    RunFailed,
    read_manifest,
)

LOOK_SECONDS = 1.0  # between two checks for new workers
STOP_SECONDS = 10.0  # for workers to end their rounds, when a sweep is stopped
ON_GPU, ON_CORE = ("cuda", True), ("cpu", False)  # device of an actor, and whether it stacks points

MOST_EVENTS = 256  # in the queue of an actor: when it is full, training waits
EVENT_SECONDS = 0.5  # for which an actor waits for an event

logger = logging.getLogger(__name__)


class SentPoint(NamedTuple):
    """A point as it is sent to an actor."""

    name: str
    settings: dict[str, Any]  # its experiment without the data set
    precision: Precision  # of the computation
    named: Named | None  # the data set, unless it was given from Python
    dataset: int  # its key among those sent; if it is not among them, it is on every disk
    files: dict[str, bytes] | None  # of its run folder, if it has one
    typed: dict[str, Any]  # functions of the driver's `__main__` that its experiment names


Event = tuple[str, Change | Record | Result] | Exception | None
"""The name of a point with a change to its folder, a record, or its result. The last one of a share
is an error, or None if it is done or was stopped."""


class Stopped(Exception):
    """Raised to stop an actor because another point of the sweep has failed."""


class PointActor:
    """Runs points one after another, or stacks those that can be stacked: see `points.py`."""

    def __init__(
        self, device: Literal["cpu", "cuda"], stacks: bool, data: Path | None, keep_states: bool
    ) -> None:
        self.device, self.stacks = device, stacks
        self.data, self.keep_states = data, keep_states  # as those of the sweep
        self._events: queue.Queue[Event] = queue.Queue(MOST_EVENTS)
        self._stop: type[BaseException] | None = None

    def set_up(self, driver: Driver) -> str:
        return driver.set_up_worker()

    def load(self, datasets: dict[int, Message]) -> str:
        """Unpack the data sets; return "", since there is no error to report."""
        remove_stale()
        self.datasets: dict[int, Dataset] = {key: unpack(one) for key, one in datasets.items()}
        if self.device == "cpu":
            keep_memory()
        return ""

    def start(self, share: Sequence[SentPoint]) -> Message:
        """Start a share of the points in a thread; return an empty list of events."""
        threading.Thread(target=self._run, args=[share], daemon=True).start()
        return pack([])

    def stop(self, interrupted: bool) -> None:
        """Stop the points after their current round."""
        self._stop = KeyboardInterrupt if interrupted else Stopped

    def events(self) -> Message:
        """The new `Event`s since the last call, in order."""
        found: list[Event] = []
        try:
            found.append(self._events.get(timeout=EVENT_SECONDS))
            while True:
                found.append(self._events.get_nowait())
        except queue.Empty:
            return pack(found)

    def _run(self, share: Sequence[SentPoint]) -> None:
        if self.device == "cpu":
            torch.set_num_threads(1)
        place = own_folder()
        ended: Exception | None = None
        try:
            points: list[Point] = []
            for sent in share:
                points.append(self._point(sent, place, points))
            stacks = into_stacks(points)
            for point, result in run_stacks(stacks, self._watch_of, self.keep_states):
                models = {"tensors": result.tensors, "best_model": result.best_model}
                result = replace(result, **map_tensors(models, Tensor.cpu))
                self._events.put((point.name, result))
        except RunFailed as error:
            ended = error
        except (KeyboardInterrupt, Stopped):
            pass
        except BaseException as error:
            line = f"{type(error).__name__}: {error}".splitlines()[0]
            ended = RuntimeError(f"a worker failed: {line}\n{traceback.format_exc()}")
            if mistake := mistake_of(error):
                ended = ValueError(mistake)
        shutil.rmtree(place, ignore_errors=True)
        self._events.put(ended)

    def _point(self, sent: SentPoint, place: Path, others: Sequence[Point]) -> Point:
        dataset = self.datasets.get(sent.dataset)
        given = sent.named or dataset
        assert given is not None
        vars(sys.modules["__main__"]).update(sent.typed)
        experiment = Experiment(dataset=given, **sent.settings)
        known = {repr(given): dataset} if dataset is not None else {}
        described = replace(experiment, device=self.device, precision=sent.precision)
        engine: EngineName = "stacked" if self.stacks else "sequential"
        setup = build_point(replace(described, engine=engine), self.data, known)
        if not self.stacks:  # with the results of a worker of `processes`
            fast = Sequential(setup.network, setup.federation.examples, fast=True)
            setup = replace(setup, engine=fast)
        folder = None
        if sent.files is not None:
            folder = place / sent.name
            for name, content in sent.files.items():
                write_atomically(folder / name, content)
        return Point(
            sent.name,
            experiment,
            sharing(setup, others),
            folder,
            overwrite=False,
            on_change=lambda change: self._events.put((sent.name, change)),
        )

    def _watch_of(self, point: Point) -> Watch:
        def watch(record: Record) -> None:
            self._events.put((point.name, record))
            if self._stop is not None:
                raise self._stop

        return watch


@dataclass(frozen=True)
class SpreadPoints:
    """Points that each run on one core or GPU, instead of one after another on all of them."""

    points: Sequence[Point]

    @classmethod
    def among(cls, points: Sequence[Point]) -> SpreadPoints:
        """The points of engine `ray`, if they keep as many workers busy as a round's clients would.

        Points with initial weights are left out: other nodes may not have the file.
        """
        found = cls(
            [
                point
                for point in points
                if isinstance(point.setup.engine, Ray) and point.experiment.weights is None
            ]
        )
        if len(found.points) < 2:
            return cls([])
        workers = max(point.setup.experiment.clients.cohort for point in found.points)
        if len(found.points) < workers:
            workers = min(workers, found.num_workers)
        return found if len(found.points) >= workers else cls([])

    @cached_property
    def datasets(self) -> dict[int, Message]:
        """The data sets that actors are sent, by `id`; prepared stores are on every disk."""
        sent = {
            id(point.setup.dataset): point.setup.dataset
            for point in self.points
            if not (point.setup.dataset.is_mapped and isinstance(point.experiment.dataset, Named))
        }
        return {key: pack(dataset) for key, dataset in sent.items()}

    @property
    def on_gpus(self) -> bool:
        engines = [point.setup.engine for point in self.points]
        return all(isinstance(engine, Ray) and engine.on_gpus for engine in engines)

    @property
    def num_workers(self) -> int:
        """How many cores, or GPUs, the cluster has for them."""
        return sum(resources_by_node(self.connect(), self.on_gpus).values())

    @property
    def shares(self) -> list[list[Point]]:
        """The points that a worker gets at once: one; on GPUs, which stack them, an even share."""
        return even_shares(self.points, self.num_workers if self.on_gpus else len(self.points))

    def connect(self) -> Any:
        """Ray, connected to a cluster with memory for the data sets sent to workers."""
        messages = self.datasets.values()
        return connect(sum(array.nbytes for message in messages for array in arrays_of(message)))


def even_shares(points: Sequence[Point], count: int) -> list[list[Point]]:
    """The points in at most `count` shares of consecutive points and about equal size."""
    count = min(count, len(points))
    cuts = [len(points) * number // count for number in range(count + 1)]
    return [list(points[start:end]) for start, end in pairwise(cuts)]


def sent_point(point: Point, folder: RunFolder | None) -> SentPoint:
    experiment = point.experiment
    names = [field.name for field in fields(experiment) if field.name != "dataset"]
    given = experiment.dataset
    return SentPoint(
        point.name,
        {name: getattr(experiment, name) for name in names},
        point.setup.experiment.precision,
        given if isinstance(given, Named) else None,
        id(point.setup.dataset),
        _files(folder.path) if folder is not None else None,
        typed_functions(experiment),
    )


def _files(folder: Path) -> dict[str, bytes]:
    """The files that a run resumes from."""
    paths = [folder / name for name in (EXPERIMENT, MANIFEST, ROUNDS, SUMMARY)]
    paths += (folder / CHECKPOINT).rglob("*")
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths if path.is_file()}


def _opened(point: Point) -> RunFolder:
    """The locked folder of a point, which an actor runs."""
    check_asked(point.setup)
    if point.begun is None:
        assert point.folder is not None
        setup = replace(point.setup, threads=1)  # as actors have
        return new_run(point.experiment, setup, point.folder, point.overwrite)
    folder = RunFolder.open(point.begun)
    try:
        before = read_manifest(folder.path)
        check_settings(folder.path, point.experiment, before)
        setup = as_it_began(point.setup, before, folder.path)
        check_unchanged(folder.path, setup, before)
    except BaseException:
        folder.close()
        raise
    return folder


class Spread:
    """Runs shares of points on the workers of a cluster."""

    def __init__(
        self,
        spread: SpreadPoints,
        watch: Callable[[Point, Record], None],
        data: Path | None,
        keep_states: bool,
    ) -> None:
        self.ray, on_gpus = spread.connect(), spread.on_gpus
        datasets = self.ray.put(spread.datasets)
        arguments = *(ON_GPU if on_gpus else ON_CORE), data, keep_states
        self.group = ActorGroup(self.ray, PointActor, arguments, datasets, on_gpus)
        self.watch = watch
        self.points = {point.name: point for point in spread.points}
        self.folders: dict[str, RunFolder] = {}  # of the points that were handed out
        self.shares = spread.shares  # without the points that are over
        self.waiting = deque(range(len(self.shares)))
        self.lost: Counter[int] = Counter()  # how often a share was lost with its worker
        self.events: deque[Event] = deque()  # received from workers, not yet applied here

    @property
    def busy(self) -> list[RemoteWorker]:
        return [worker for worker in self.group.workers if worker.given]

    def run(self) -> Iterator[tuple[Point, Result]]:
        """Run the points; yield each with its result when it ends."""
        try:
            while self.waiting or self.busy:
                self.group.start(len(self.waiting) + len(self.busy))
                self._hand_out()
                self._receive(LOOK_SECONDS)
                yield from self._apply_events()
        except HeadLost:  # no worker can be reached to stop it
            raise
        except BaseException as error:
            with contextlib.suppress(self.ray.exceptions.RayError):
                self._stop(isinstance(error, KeyboardInterrupt))
            raise
        finally:
            for folder in self.folders.values():
                folder.close()
            self.group.stop()

    def _hand_out(self) -> None:
        for worker in self.group.workers:
            if self.waiting and not worker.given:
                number = self.waiting[0]
                share = [self._sent(point) for point in self.shares[number]]
                worker.given.append((number, worker.handle.start.remote(share)))
                self.waiting.popleft()

    def _sent(self, point: Point) -> SentPoint:
        if point.folder is not None and point.name not in self.folders:
            self.folders[point.name] = _opened(point)
        return sent_point(point, self.folders.get(point.name))

    def _receive(self, seconds: float) -> None:
        """Collect the events of busy workers, and queue the shares of lost workers again."""
        asked = {reference: worker for worker in self.busy for _, reference in worker.given}
        for reference in arrived(self.ray, asked, seconds):
            worker = asked[reference]
            number, _ = worker.given.pop()
            try:
                events: list[Event] = unpack(self.ray.get(reference))
            except lost_errors(self.ray):
                self._remove(worker, number)
                continue
            except self.ray.exceptions.RayError as error:  # the worker cannot read what it was sent
                raise RuntimeError(f"a worker failed: {str(error).splitlines()[-1]}") from error
            self.events += events
            if not events or isinstance(events[-1], tuple):  # it goes on
                worker.given.append((number, worker.handle.events.remote()))

    def _remove(self, worker: RemoteWorker, number: int) -> None:
        self.group.remove(worker)
        left = ", ".join(point.name for point in self.shares[number])
        if not left:  # it was lost after its work
            return
        self.lost[number] += 1
        if self.lost[number] == TRIES:
            raise ChildProcessError(
                f"a worker of the Ray cluster was lost {TRIES} times over {left}, perhaps "
                "because memory ran out: choose a smaller local.batch_size"
            )
        logger.warning("a worker of the Ray cluster was lost: another goes on with %s", left)
        self.waiting.appendleft(number)

    def _apply_events(self) -> Iterator[tuple[Point, Result]]:
        """Apply the workers' events here; after an interrupt, an event may be applied twice."""
        while self.events:
            ended = self._apply(self.events[0])
            self.events.popleft()
            if ended is not None:
                yield ended

    def _apply(self, event: Event) -> tuple[Point, Result] | None:
        if isinstance(event, Exception):
            raise event
        if event is None:
            return None
        name, told = event
        point = self.points[name]
        if isinstance(told, Change):
            self.folders[name].make(told)
        elif isinstance(told, Result):
            self.shares = [[p for p in share if p is not point] for share in self.shares]
            if name in self.folders:
                self.folders[name].close()
            return point, replace(told, folder=point.folder)
        else:
            self.watch(point, told)
        return None

    def _stop(self, interrupted: bool) -> None:
        """Keep the points' last complete round if it ends soon, otherwise the last checkpoint."""
        for worker in self.busy:
            worker.handle.stop.remote(interrupted)
        self.watch, until = lambda _point, _record: None, time.monotonic() + STOP_SECONDS
        while True:
            self.events = deque(one for one in self.events if isinstance(one, tuple))
            deque(self._apply_events(), maxlen=0)
            if not self.busy or time.monotonic() > until:
                return
            self._receive(LOOK_SECONDS)
