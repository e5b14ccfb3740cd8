"""A run: rounds, evaluation, record, checkpoint."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fedlens.build import Setup, build
from fedlens.client import ClientProgram
from fedlens.core import Tree
from fedlens.data import statistics
from fedlens.engines import Engine
from fedlens.evaluate import evaluate_run
from fedlens.experiment import Experiment
from fedlens.folder import RunFolder, check_free, readable_json, to_json
from fedlens.manifest import manifest, partition_hash
from fedlens.options import importable
from fedlens.rounds import State, Turn, begin, run_rounds
from fedlens.settings import torch_settings
from fedlens.summary import Record, is_number, summary

if TYPE_CHECKING:
    from fedlens.twin import Twin

Watch = Callable[[Record], None]

CHECKPOINT_SECONDS = 10.0  # at the most this much work is done twice after a sudden death


@dataclass(frozen=True)
class Result:
    """What a run came to."""

    status: str  # finished or diverged
    records: list[Record]
    summary: dict[str, Any]
    model: Tree  # parameters and buffers, as module.load_state_dict takes them
    folder: Path | None

    @property
    def final(self) -> dict[str, float]:
        """The last evaluation, by name: test_accuracy, test_loss, ..."""
        final: dict[str, float] = self.summary["final"]
        return final


def run(
    experiment: Experiment,
    out: str | Path | None = None,
    *,
    overwrite: bool = False,
    data: str | Path | None = None,
    watch: Watch | None = None,
) -> Result:
    """Run an experiment, and write its folder if `out` names one.

    `data` is where named data sets are looked for first; `watch` is called with each record and,
    before, with each pass of the centralised twin, if one is trained (see `fedlens.twin.trained`).
    """
    if out is not None:
        check_free(Path(out), overwrite)
    setup = build(experiment, Path(data) if data is not None else None)
    (result,) = go_on([start(experiment, setup, out, overwrite=overwrite, watch=watch)])
    return result


def resume(
    path: str | Path,
    *,
    data: str | Path | None = None,
    watch: Watch | None = None,
    experiment: Experiment | None = None,
) -> Result:
    """Go on where a run stopped, to the result it would have had.

    `experiment` is needed only if the run's data or model were given from Python.
    """
    folder = RunFolder(Path(path))
    before = folder.read_json("manifest.json")
    with importable(*map(Path, before["code"])):
        experiment = experiment or Experiment.read(folder.path / "experiment.toml")
    experiment = as_begun(experiment, before)
    setup = build(experiment, Path(data) if data is not None else None)
    (result,) = go_on([reopen(folder, setup, watch)])
    return result


def as_begun(experiment: Experiment, manifest: dict[str, Any]) -> Experiment:
    """With the engine and the precision that a run began with, whatever `auto` means here."""
    chosen = {key: manifest[key] for key in ("engine", "precision") if key in manifest}
    return replace(experiment, **chosen)


def train(setup: Setup, watch: Watch | None = None) -> Result:
    """Run what is set up, without a folder."""
    (result,) = go_on([start(setup.experiment, setup, watch=watch)])
    return result


def start(
    experiment: Experiment,
    setup: Setup,
    out: str | Path | None = None,
    *,
    overwrite: bool = False,
    watch: Watch | None = None,
) -> Course:
    """A run at its start; its folder is made if `out` names one."""
    twin = _twin(setup, watch)
    state = begin(setup.network, setup.program, setup.federation, setup.device)
    folder = None
    if out is not None:
        files = {
            "experiment.toml": experiment.toml(),
            "manifest.json": readable_json(manifest(setup)),
            "partition.json": readable_json(_partition(setup)),
        }
        folder = RunFolder.create(Path(out), overwrite, files)
    return Course(setup, state, folder, watch=watch, twin=twin)


def reopen(folder: RunFolder, setup: Setup, watch: Watch | None = None) -> Course:
    """A run where its last checkpoint is; `setup` is made of its own experiment."""
    path, before = folder.path, folder.read_json("manifest.json")
    if partition_hash(setup) != before["partition"]:
        raise ValueError(f"{path}: the data are not those it started with: find the old ones")
    if setup.weights and setup.weights.sha256 != before["weights"]["sha256"]:
        raise ValueError(f"{path}: {setup.weights.source} has changed: find the old file")
    twin = _twin(setup, watch)
    state = begin(setup.network, setup.program, setup.federation, setup.device)
    if folder.last_saved is not None:
        saved = folder.load_state(setup.device)
        if _shapes(saved) != _shapes(state):
            raise ValueError(f"{path} was run with another model: put the old one back")
        # In the order of the model, not of the file: sums over all parameters go by it.
        params, buffers = (
            {name: getattr(saved, part)[name] for name in getattr(state, part)}
            for part in ("params", "buffers")
        )
        state = replace(saved, params=params, buffers=buffers)
    return Course(setup, state, folder, folder.cut_records(state.round), watch, twin)


def _twin(setup: Setup, watch: Watch | None) -> Twin | None:
    if not setup.experiment.evaluate.twin:
        return None
    from fedlens.twin import trained  # which is itself a run

    return trained(setup, watch)


class Course:
    """A run under way: where it stands, and what it has come to so far."""

    def __init__(
        self,
        setup: Setup,
        state: State,
        folder: RunFolder | None = None,
        records: list[Record] | None = None,
        watch: Watch | None = None,
        twin: Twin | None = None,
    ) -> None:
        self.setup, self.state, self.folder = setup, state, folder
        self.front = state  # where it will be after the rounds that have begun
        self.records, self.watch, self.twin = records or [], watch, twin
        lost = not math.isfinite(float(_soundness(state))) or _is_lost(self.records)
        self.status = "diverged" if lost else "running"
        self.started = self.saved = self.taken = time.perf_counter()
        self.done = len(self.records)
        self.before = folder.summary(self.done) if folder else {}
        spent = sum(r["seconds"] + r.get("evaluation_seconds", 0.0) for r in self.records)
        self.earlier = self.before["seconds"]["total"] if self.before else spent

    @property
    def is_over(self) -> bool:
        return self.status != "running" or self.state.round >= self.setup.experiment.rounds

    @property
    def has_more(self) -> bool:
        """Whether there are rounds yet to begin."""
        return not self.is_over and self.front.round < self.setup.experiment.rounds

    @property
    def num_batches(self) -> int:
        """Of the client that took the most in each round, added up."""
        return int(self.records[-1]["batches_total"]) if self.records else 0

    @property
    def turn(self) -> Turn:
        setup = self.setup
        return Turn(setup.program, setup.federation, self.front, setup.experiment.seed)

    def take(self, after: State, record: Record, is_sound: bool) -> None:
        """A round more: evaluate it if it is time to, write it down, save the state at times."""
        experiment, trained = self.setup.experiment, time.perf_counter()
        if not is_sound or _is_lost([record]):
            self.status = "diverged"
        elif after.round % experiment.evaluate.every == 0 or after.round == experiment.rounds:
            measured, details = evaluate_run(self.setup, after, self.twin)
            record |= measured
            if self.folder is not None and after.round == experiment.rounds:
                self.folder.write("evaluation.json", to_json(details.plain()) + "\n")
            record["evaluation_seconds"] = time.perf_counter() - trained
        if self.folder is not None:
            self.folder.append(record)
        self.records.append(record)
        self.state = after
        if self.watch is not None:
            self.watch(record)
        if self.folder is not None and time.perf_counter() - self.saved > CHECKPOINT_SECONDS:
            self.folder.save_state(after)
            self.saved = time.perf_counter()
        self.taken = time.perf_counter()

    def finish(self) -> None:
        status = "finished" if self.status == "running" else self.status
        if self.folder is not None:
            self.folder.save_state(self.state)
            self.folder.save_model(self.model)
        self.settle(status)

    def stop(self, error: BaseException) -> None:
        """Keep the last whole round: a state is a value, whatever was under way."""
        if self.folder is not None:
            self.folder.save_state(self.state)
            del self.records[self.state.round :]
        self.settle("interrupted" if isinstance(error, KeyboardInterrupt) else "failed")

    def settle(self, status: str) -> None:
        self.status, self.summary = status, self.before
        if len(self.records) > self.done or status != self.before.get("status"):
            elapsed = self.earlier + time.perf_counter() - self.started
            self.summary = summary(self.setup, status, self.records, elapsed, self.twin)
        if self.folder is not None:
            self.folder.write_json("summary.json", self.summary)

    @property
    def model(self) -> Tree:
        return self.state.params | self.state.buffers | self.setup.network.frozen

    @property
    def result(self) -> Result:
        folder = self.folder.path if self.folder else None
        return Result(self.status, self.records, self.summary, self.model, folder)


def go_on(courses: Sequence[Course]) -> list[Result]:
    """Go on with runs until all are over, on the first one's engine.

    If there are several, their clients train as one cohort: see `fedlens.sweep` for which can.
    """
    live, setup = list(courses), courses[0].setup
    crew: list[Course] = []  # whose clients train together
    together: ClientProgram | None = None
    under_way: deque[Round] = deque()
    ahead = _ahead(setup)
    try:
        for course in live:
            course.settle(course.status)
        with torch_settings(setup.experiment, setup.device):
            while live:
                going = [course for course in live if course.has_more]
                if going:
                    if going != crew:
                        crew = going
                        like = next(iter(crew[0].state.params.values()))
                        together = ClientProgram.together([c.setup.program for c in crew], like)
                    assert together is not None
                    under_way.append(Round(together, setup.engine, crew))
                while under_way and (len(under_way) > ahead or not going):
                    under_way.popleft().end()
                for course in [course for course in live if course.is_over]:
                    course.finish()
                    live.remove(course)
    except BaseException as error:
        for course in live:
            course.stop(error)
        raise
    finally:
        setup.engine.close()
    return [course.result for course in courses]


def _ahead(setup: Setup) -> int:
    """How many rounds begin before the last is looked at: a GPU computes meanwhile."""
    return 1 if setup.device.type == "cuda" else 0


class Round:
    """A round of runs that has begun; on a GPU it may not have been computed yet."""

    def __init__(self, together: ClientProgram, engine: Engine, courses: Sequence[Course]) -> None:
        self.begun, self.courses = time.perf_counter(), list(courses)
        self.after = run_rounds(together, engine, [course.turn for course in courses])
        numbers = []
        for course, (state, outcome) in zip(courses, self.after, strict=True):
            course.front = state
            numbers += [outcome.train_loss, *outcome.scalars.values(), _soundness(state)]
        self.numbers = Reading(torch.stack([number.double() for number in numbers]))

    def end(self) -> None:
        """Take it down in the courses that have not ended since."""
        numbers = iter(self.numbers.values())
        seconds = time.perf_counter() - max(self.begun, *(c.taken for c in self.courses))
        for course, (state, outcome) in zip(self.courses, self.after, strict=True):
            record: Record = {
                "round": state.round,
                "train_loss": next(numbers),
                "batches": outcome.batches,
                "batches_total": course.num_batches + outcome.batches,
                "examples": outcome.examples,
                "bytes_up": outcome.bytes_up,
                "bytes_down": outcome.bytes_down,
                **{name: next(numbers) for name in outcome.scalars},
                "seconds": seconds / len(self.courses),
            }
            is_sound = math.isfinite(next(numbers))
            if course.status == "running":
                course.take(state, record, is_sound)


class Reading:
    """Numbers on their way from the device, so that reading them waits for nothing else."""

    def __init__(self, numbers: torch.Tensor) -> None:
        self.numbers, self.event = numbers, None
        if numbers.is_cuda:
            self.numbers = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self.numbers.copy_(numbers, non_blocking=True)
            self.event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self.event.record()

    def values(self) -> list[float]:
        if self.event is not None:
            self.event.synchronize()
        values: list[float] = self.numbers.tolist()
        return values


def _is_lost(records: list[Record]) -> bool:
    """Whether the last training loss is no number any more (None, once it was written)."""
    return bool(records) and not is_number(records[-1]["train_loss"])


def _soundness(state: State) -> torch.Tensor:  # []
    """A number that is finite if all of the model is."""
    sums = [p.sum() for p in (*state.params.values(), *state.buffers.values())]
    return torch.stack([s.double() for s in sums]).sum()


def _partition(setup: Setup) -> dict[str, Any]:
    held = setup.federation.everyone(0)
    return statistics.summary(held, setup.federation.labels, setup.dataset.num_classes)


def _shapes(state: State) -> dict[str, torch.Size]:
    return {name: t.shape for name, t in (state.params | state.buffers).items()}
