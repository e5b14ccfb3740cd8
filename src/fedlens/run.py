"""A run: rounds, evaluation, record, checkpoint."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fedlens.budgets import at_round_numbers, rounds_to
from fedlens.build import Setup, build
from fedlens.client import ClientProgram
from fedlens.core import Tree
from fedlens.data import statistics
from fedlens.engines import Engine
from fedlens.engines.processes import largest_yet
from fedlens.evaluate import evaluate_run, judged
from fedlens.experiment import Experiment
from fedlens.folder import RunFolder, check_free, readable_json, to_json
from fedlens.manifest import manifest, partition_hash
from fedlens.options import importable
from fedlens.rounds import State, Turn, begin, run_rounds
from fedlens.settings import torch_settings

if TYPE_CHECKING:
    from fedlens.twin import Twin

Record = dict[str, Any]
"""One line of rounds.jsonl: what a round did and, if it was evaluated, how good the model is."""

Watch = Callable[[Record], None]

CHECKPOINT_SECONDS = 10.0  # at the most this much work is done twice after a sudden death
NO_MEASURES = {"round", "seconds", "evaluation_seconds", "train_loss", "examples"}
NO_MEASURES |= {"batches", "batches_total", "bytes_up", "bytes_down"}
SHARES = (80, 90, 95, 99)  # percent of the twin's accuracy, for which rounds are counted


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
    experiment = replace(experiment, engine=before["engine"])
    setup = build(experiment, Path(data) if data is not None else None)
    (result,) = go_on([reopen(folder, setup, watch)])
    return result


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
        state = saved
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
        self.records, self.watch, self.twin = records or [], watch, twin
        lost = not _is_finite(state) or _is_lost(self.records)
        self.status = "diverged" if lost else "running"
        self.started = self.saved = time.perf_counter()
        self.done = len(self.records)
        self.before = folder.summary(self.done) if folder else {}
        spent = sum(r["seconds"] + r.get("evaluation_seconds", 0.0) for r in self.records)
        self.earlier = self.before["seconds"]["total"] if self.before else spent

    @property
    def is_over(self) -> bool:
        return self.status != "running" or self.state.round >= self.setup.experiment.rounds

    @property
    def num_batches(self) -> int:
        """Of the client that took the most in each round, added up."""
        return int(self.records[-1]["batches_total"]) if self.records else 0

    @property
    def turn(self) -> Turn:
        setup = self.setup
        return Turn(setup.program, setup.federation, self.state, setup.experiment.seed)

    def take(self, after: State, record: Record) -> None:
        """A round more: evaluate it if it is time to, write it down, save the state at times."""
        experiment, trained = self.setup.experiment, time.perf_counter()
        if not _is_finite(after) or _is_lost([record]):
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
            self.summary = _summary(self.setup, status, self.records, elapsed, self.twin)
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
    together = None
    try:
        for course in live:
            course.settle(course.status)
        with torch_settings(setup.experiment, setup.device):
            while True:
                for course in [course for course in live if course.is_over]:
                    course.finish()
                    live.remove(course)
                    together = None
                if not live:
                    break
                if together is None:
                    like = next(iter(live[0].state.params.values()))
                    together = ClientProgram.together([c.setup.program for c in live], like)
                _one_round(together, setup.engine, live)
    except BaseException as error:
        for course in live:
            course.stop(error)
        raise
    finally:
        setup.engine.close()
    return [course.result for course in courses]


def _one_round(together: ClientProgram, engine: Engine, courses: Sequence[Course]) -> None:
    started = time.perf_counter()
    after = run_rounds(together, engine, [course.turn for course in courses])
    records: list[Record] = [
        {
            "round": state.round,
            "train_loss": float(outcome.train_loss),
            "batches": outcome.batches,
            "batches_total": course.num_batches + outcome.batches,
            "examples": outcome.examples,
            "bytes_up": outcome.bytes_up,
            "bytes_down": outcome.bytes_down,
            **{name: float(value) for name, value in outcome.scalars.items()},
        }
        for course, (state, outcome) in zip(courses, after, strict=True)
    ]
    seconds = (time.perf_counter() - started) / len(courses)
    for course, (state, _), record in zip(courses, after, records, strict=True):
        course.take(state, record | {"seconds": seconds})


def _is_lost(records: list[Record]) -> bool:
    """Whether the last training loss is no number any more (None, once it was written)."""
    return bool(records) and not _is_number(records[-1]["train_loss"])


def _is_number(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _is_finite(state: State) -> bool:
    sums = [p.sum() for p in (*state.params.values(), *state.buffers.values())]
    return bool(torch.stack([s.double() for s in sums]).isfinite().all())


def _summary(
    setup: Setup,
    status: str,
    records: list[Record],
    elapsed: float,
    twin: Twin | None,
) -> dict[str, Any]:
    evaluated = [record for record in records if any("_accuracy" in key for key in record)]
    measures = [key for key in (evaluated[-1] if evaluated else {}) if key not in NO_MEASURES]
    best: dict[str, Any] = {}
    for key in (key for key in measures if not key.endswith("_classes_predicted")):
        better = min if key.endswith(("loss", "std")) else max
        sound = [record for record in evaluated if _is_number(record.get(key))]
        if sound:
            record = better(sound, key=lambda r: r[key])
            best[key] = {"value": record[key], "round": record["round"]}
    training, evaluation = (
        sum(record.get(key, 0.0) for record in records) for key in ("seconds", "evaluation_seconds")
    )
    against: dict[str, Any] = {}
    if twin is not None:
        reached = {str(s): rounds_to(records, s / 100, "relative_accuracy") for s in SHARES}
        against = {"twin": twin._asdict(), "rounds_to": reached}
    at_budgets = {}
    if setup.experiment.evaluate.on:
        at_budgets = at_round_numbers(records, f"{judged(setup.experiment)}_accuracy")
    return {
        "status": status,
        "rounds": len(records),
        "collapsed": bool(evaluated) and _is_constant(evaluated[-1]),
        "final": {key: evaluated[-1][key] for key in measures}
        | ({"train_loss": records[-1]["train_loss"]} if records else {}),
        "best": best,
        **at_budgets,
        **against,
        "emd": statistics.emd(_label_counts(setup)),
        "seconds": {"training": training, "evaluation": evaluation, "total": elapsed},
        **{
            key: sum(record[key] for record in records)
            for key in ("batches", "examples", "bytes_up", "bytes_down")
        },
        "peak_memory_bytes": peak_memory(setup),
    }


def _is_constant(record: Record) -> bool:
    """Whether the model gave one and the same class to everything it was evaluated on."""
    return any(record.get(f"{part}_classes_predicted") == 1 for part in ("test", "validation"))


def _label_counts(setup: Setup) -> torch.Tensor:
    return setup.federation.label_counts(setup.federation.everyone(0))


def _partition(setup: Setup) -> dict[str, Any]:
    held = setup.federation.everyone(0)
    return statistics.summary(held, setup.federation.labels, setup.dataset.num_classes)


def _shapes(state: State) -> dict[str, torch.Size]:
    return {name: t.shape for name, t in (state.params | state.buffers).items()}


def peak_memory(setup: Setup) -> int:
    """The most that was in use: of the GPU, else by this process and by its workers besides."""
    if setup.device.type == "cuda":
        return torch.cuda.max_memory_allocated(setup.device)
    return largest_yet() + getattr(setup.engine, "worker_bytes", 0)
