"""An actor of a Ray cluster that runs points of a sweep, as a sweep on one machine does.

It writes temporary run folders and reports each change; the driver makes the same changes in the
sweep's folder, on a machine that need not share a disk with this one.
"""

from __future__ import annotations

import queue
import shutil
import sys
import threading
import traceback
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from fedlens.config.experiment import Experiment, Named, Precision
from fedlens.config.names import EngineName
from fedlens.config.own_code import mistake_of
from fedlens.core.federation import Dataset
from fedlens.core.trees import moved
from fedlens.engines import Sequential
from fedlens.engines.cluster import own_folder, remove_stale
from fedlens.engines.driver import Driver
from fedlens.engines.messages import Message, pack, unpack
from fedlens.engines.trainer import keep_memory
from fedlens.runs.folder import Change
from fedlens.runs.points import Point, build_point, into_stacks, run_stacks, sharing
from fedlens.runs.result import Result
from fedlens.runs.summary import Record
from fedlens.runs.watching import Watch
from fedlens.storage.files import write_atomically
from fedlens.storage.run_files import RunFailed

MOST_EVENTS = 256  # in the queue: when it is full, training waits
EVENT_SECONDS = 0.5  # to wait for an event


class SentPoint(NamedTuple):
    """A point as it is sent to an actor."""

    name: str
    settings: dict[str, Any]  # its experiment without the data set
    precision: Precision  # of the computation
    named: Named | None  # the data set, unless it was given from Python
    dataset: int  # its key among those sent; if it is not among them, it is on every disk
    files: dict[str, bytes] | None  # of its run folder, if it has one
    typed: dict[str, Any]  # functions of the driver's `__main__` that its experiment names


class Share(NamedTuple):
    """The points that one actor runs."""

    points: Sequence[SentPoint]
    data: Path | None  # where named data sets are searched first
    keep_states: bool


class ShareEnded(NamedTuple):
    """The share is done, was stopped, or ended with an error."""

    raises: type[Exception] | None = None
    text: str = ""


Event = tuple[str, Change | Record | Result] | ShareEnded
"""The name of a point with a change to its folder, a record, or its result; or the end of all."""


class Stopped(Exception):
    """Raised to stop an actor because another point of the sweep has failed."""


class PointActor:
    """Runs points one after another, or stacks those that can be stacked: see `points.py`."""

    def __init__(self, device: Literal["cpu", "cuda"], stacks: bool) -> None:
        self.device, self.stacks = device, stacks
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

    def start(self, share: Share) -> Message:
        """Start a share in a thread; return an empty list of events."""
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

    def _run(self, share: Share) -> None:
        if self.device == "cpu":
            torch.set_num_threads(1)
        place = own_folder()
        try:
            points: list[Point] = []
            for sent in share.points:
                points.append(self._point(sent, share.data, place, points))
            stacks = into_stacks(points)
            for point, result in run_stacks(stacks, self._watch_of, share.keep_states):
                self._events.put((point.name, _on_cpu(result)))
            ended = ShareEnded()
        except RunFailed as error:
            ended = ShareEnded(RunFailed, str(error))
        except (KeyboardInterrupt, Stopped):
            ended = ShareEnded()
        except BaseException as error:
            line = f"{type(error).__name__}: {error}".splitlines()[0]
            ended = ShareEnded(RuntimeError, f"a worker failed: {line}\n{traceback.format_exc()}")
            if mistake := mistake_of(error):
                ended = ShareEnded(ValueError, mistake)
        shutil.rmtree(place, ignore_errors=True)
        self._events.put(ended)

    def _point(
        self, sent: SentPoint, data: Path | None, place: Path, others: Sequence[Point]
    ) -> Point:
        dataset = self.datasets.get(sent.dataset)
        given = sent.named or dataset
        assert given is not None
        vars(sys.modules["__main__"]).update(sent.typed)
        experiment = Experiment(dataset=given, **sent.settings)
        known = {repr(given): dataset} if dataset is not None else {}
        described = replace(experiment, device=self.device, precision=sent.precision)
        engine: EngineName = "stacked" if self.stacks else "sequential"
        setup = build_point(replace(described, engine=engine), data, known)
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


def _on_cpu(result: Result) -> Result:
    here = torch.device("cpu")
    best = result.best_model
    best = None if best is None else moved(best, here)
    return replace(result, model=moved(result.model, here), best_model=best)
