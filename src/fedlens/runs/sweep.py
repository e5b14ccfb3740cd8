"""A sweep: several experiments that belong together, side by side where that is faster.

Points are stacked if they differ in seeds and numbers alone and their engine is `stacked`: their
clients then train as one cohort, each with the model, the data and the numbers of its own point.
A cohort of ten leaves most of a GPU idle; the cohorts of six points together do not. All others
run one after another. The results are the same.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedlens.algorithm import alike
from fedlens.core import Tree
from fedlens.engines import Stacked
from fedlens.experiment import Experiment, Named
from fedlens.federation import Dataset, Examples
from fedlens.locks import one_writer
from fedlens.rounds import begin
from fedlens.run_files import (
    EXPERIMENT,
    OVER,
    experiment_text,
    is_run,
    last_saved,
    read_manifest,
    read_records,
    read_status,
    read_summary,
)
from fedlens.runs.active import ActiveRun, Watch, run_to_end
from fedlens.runs.folder import RunFolder, check_free
from fedlens.runs.manifest import check_settings
from fedlens.runs.result import Result
from fedlens.runs.run import as_begun, reopen, start
from fedlens.runs.summary import Record
from fedlens.setup import Setup, build
from fedlens.tables import apply_override, to_value

MAY_DIFFER = {
    *("dataset", "engine", "device"),  # of which the outcome is compared
    *("rounds", "seed", "loss", "clients", "local", "server", "evaluate", "algorithm", "stop"),
    *("faults", "reporting"),
}
"""Keys in which stacked points may differ, as long as what their clients do is alike."""


def grid(
    base: Experiment, axes: Mapping[str, Sequence[Any]], seeds: int | None = None
) -> dict[str, Experiment]:
    """Every combination of the values that keys take (`{"local.lr": [0.1, 0.2]}`), by name.

    Each of them is repeated with `seeds` seeds, counted from that of `base`.
    """
    return {
        name: _changed(base, changes)
        for name, changes in combinations(axes, seeds, base.seed).items()
    }


def combinations(
    axes: Mapping[str, Sequence[Any]], seeds: int | None, first_seed: int
) -> dict[str, list[str]]:
    """The points of a grid: what each is called, and the overrides that make it."""
    axes = dict(axes)
    if seeds is not None:
        if seeds < 1 or "seed" in axes:
            raise ValueError(f"seeds is {seeds}: choose 1 or more, and no axis called seed")
        axes["seed"] = range(first_seed, first_seed + seeds)
    if not axes:
        raise ValueError("a sweep needs values to go through: give a grid, or a number of seeds")
    for key, choice in axes.items():
        if not choice:
            raise ValueError(f"{key} has no values: give at least one")
    endings = Counter(key.rpartition(".")[2] for key in axes)
    short = {key: key.rpartition(".")[2] for key in axes}
    short = {key: last if endings[last] == 1 else key for key, last in short.items()}
    points = {}
    for values in itertools.product(*axes.values()):
        chosen = dict(zip(axes, values, strict=True))
        name = ",".join(f"{short[key]}={_word(value)}" for key, value in chosen.items())
        if name in points:
            raise ValueError(f"two points of the sweep are called {name}: give each value once")
        points[name] = [f"{key}={to_value(value)}" for key, value in chosen.items()]
    return points


def _word(value: Any) -> str:
    """A value as a part of a folder's name."""
    text = value if isinstance(value, str) else to_value(value)
    return re.sub(r"[^\w.+-]+", "-", text).strip("-").removeprefix("name-")


def _changed(base: Experiment, overrides: Sequence[str]) -> Experiment:
    before = base.plain()
    tables = base.plain()
    for override in overrides:
        apply_override(tables, override)
    for name in ("dataset", "model"):
        if tables[name] == before[name]:  # it may have been given from Python
            tables[name] = getattr(base, name)
    return Experiment.of(tables)


def sweep(
    points: Mapping[str, Experiment],
    out: str | Path | None = None,
    *,
    overwrite: bool = False,
    data: str | Path | None = None,
    watch: Watch | None = None,
    keep_states: bool = True,
) -> dict[str, Result]:
    """Run experiments that belong together, each to the result it would have alone.

    Each has its run folder in `out`, under its name. What is there already is kept if it is
    finished, and gone on with if it is not. `watch` is called with each record, which also says
    whose it is (`point`) and how many rounds are done of how many in all (`done`, `total`).
    Without `keep_states` points that are done leave no checkpoint: what clients remember may be
    gigabytes, and is needed only by who asks for more rounds.
    """
    return prepare(points, out, overwrite=overwrite, data=data).run(watch, keep_states)


@dataclass(frozen=True)
class Point:
    name: str
    experiment: Experiment
    setup: Setup
    folder: Path | None
    overwrite: bool

    @property
    def begun(self) -> Path | None:
        """Its folder, if it is to go on from there."""
        if self.folder is None or self.overwrite or not self.folder.exists():
            return None
        return self.folder

    @property
    def num_saved(self) -> int:
        """Rounds that need not be run again."""
        return (last_saved(self.begun) or 0) if self.begun else 0

    def open(self, watch: Watch | None) -> ActiveRun:
        if self.begun is None:
            return start(
                self.experiment, self.setup, self.folder, overwrite=self.overwrite, watch=watch
            )
        folder = RunFolder.open(self.begun)
        try:
            check_settings(folder.path, self.experiment, read_manifest(folder.path))
            return reopen(folder, self.setup, watch)
        except BaseException:
            folder.close()
            raise


@dataclass(frozen=True)
class Sweep:
    """A sweep whose points are made and checked."""

    names: tuple[str, ...]
    out: Path | None
    kept: dict[str, Result]  # what was finished before
    stacks: list[list[Point]]  # what is to be run, one after another
    total: int  # rounds of all points

    @property
    def done(self) -> int:
        """Rounds that need not be run again."""
        return self.total - sum(self._left().values())

    def _left(self) -> dict[str, int]:
        """How many rounds each point still has before it."""
        return {
            point.name: point.experiment.rounds - point.num_saved
            for stack in self.stacks
            for point in stack
        }

    def describe(self) -> str:
        """One line: how the points will be run."""
        sizes = [len(stack) for stack in self.stacks]
        if not sizes:
            return f"all {len(self.names)} points are done"
        count = f"{sum(sizes)} points" if sum(sizes) > 1 else "1 point"
        if self.kept:
            count = f"{len(self.kept)} of {len(self.names)} points are done; {count}"
        first = self.stacks[0][0].setup
        if max(sizes) > 1:
            stacks = "one stack" if len(sizes) == 1 else f"{len(sizes)} stacks"
            return f"{count} in {stacks}, up to {max(sizes)} side by side on {first.device}"
        if len(sizes) == 1:
            return count
        if not isinstance(first.engine, Stacked):
            why = f"engine {first.engine.name} is busy with one"
        else:
            why = "their clients fill the device, or they differ in more than seeds and numbers"
        return f"{count} one after another: {why}"

    def run(self, watch: Watch | None = None, keep_states: bool = True) -> dict[str, Result]:
        results, left = dict(self.kept), self._left()

        def forward(point: Point, record: Record) -> None:
            assert watch is not None
            if "twin" not in record:
                left[point.name] = point.experiment.rounds - record["round"]
                done = self.total - sum(left.values())
                record = record | {"point": point.name, "done": done, "total": self.total}
            watch(record)

        with one_writer(self.out if self.stacks else None):
            for stack in self.stacks:
                with contextlib.ExitStack() as opened:
                    runs = []
                    for point in stack:
                        runs.append(point.open(partial(forward, point) if watch else None))
                        opened.callback(runs[-1].close)
                    for point, result in zip(stack, run_to_end(runs, keep_states), strict=True):
                        results[point.name] = result
                        left[point.name] = 0  # what diverged is over early
        return {name: results[name] for name in self.names}


def prepare(
    points: Mapping[str, Experiment],
    out: str | Path | None = None,
    *,
    overwrite: bool = False,
    data: str | Path | None = None,
) -> Sweep:
    """Make and check every point before the first is run."""
    if not points:
        raise ValueError("a sweep needs points: give at least one experiment")
    parent = Path(out) if out is not None else None
    if parent is not None and (parent / EXPERIMENT).exists():
        raise ValueError(f"{parent} is a run: choose another folder for the sweep")
    if parent is not None and parent.exists() and not parent.is_dir():
        raise ValueError(f"{parent} is a file: choose a folder for the sweep")
    kept: dict[str, Result] = {}
    made: list[Point] = []
    loaded: dict[str, Dataset] = {}
    for name, experiment in points.items():
        folder = parent / name if parent is not None else None
        described = experiment
        if folder is not None and overwrite:
            check_free(folder, overwrite)
        elif folder is not None and folder.exists():
            before = RunFolder(folder)
            _check_same(before, experiment)
            if read_status(folder) in OVER:
                kept[name] = _result(before)
                continue
            described = as_begun(experiment, read_manifest(folder))
        setup = _build(described, data, loaded)
        made.append(Point(name, experiment, _sharing(setup, made), folder, overwrite))
    total = sum(experiment.rounds for experiment in points.values())
    return Sweep(tuple(points), parent, kept, into_stacks(made), total)


def _check_same(folder: RunFolder, experiment: Experiment) -> None:
    if not is_run(folder.path):
        raise ValueError(f"{folder.path} is not a run: choose another folder")
    if experiment_text(folder.path) != experiment.toml():
        raise ValueError(
            f"{folder.path} holds another experiment: choose another folder, or overwrite it"
        )


def _result(folder: RunFolder) -> Result:
    """What a run that is over came to."""
    summary, records = read_summary(folder.path), read_records(folder.path)
    model, best = folder.load_model(), folder.load_best()
    return Result(summary["status"], records, summary, model, folder.path, best)


def _build(experiment: Experiment, data: str | Path | None, loaded: dict[str, Dataset]) -> Setup:
    """The parts of a point; a data set that several points name is loaded once."""
    data, given = Path(data) if data is not None else None, experiment.dataset
    if not isinstance(given, Named):
        return build(experiment, data)
    known = loaded.get(repr(given))
    if known is None:
        setup = build(experiment, data)
        loaded[repr(given)] = setup.dataset
        return setup
    setup = build(replace(experiment, dataset=known), data)
    return replace(setup, experiment=replace(setup.experiment, dataset=given))


def _sharing(setup: Setup, points: Sequence[Point]) -> Setup:
    """`setup`, with the examples of an earlier point in place of equal ones of its own."""
    if not isinstance(setup.engine, Stacked):
        return setup
    for other in (point.setup for point in points):
        if other.device != setup.device or other.dataset is not setup.dataset:
            continue
        if not _same_examples(other.federation.examples, setup.federation.examples):
            continue
        parts = {
            name: next((p for p in other.parts.values() if _same_examples(p, part)), part)
            for name, part in setup.parts.items()
        }
        examples = other.federation.examples
        engine = Stacked(setup.network, examples, setup.engine.at_once)
        federation = replace(setup.federation, examples=examples)
        return replace(setup, federation=federation, parts=parts, engine=engine)
    return setup


def _same_examples(one: Examples, two: Examples) -> bool:
    others = [f.name for f in fields(Examples) if f.name not in ("labels", "columns")]
    names = ["labels", *others]  # labels first: they are few, and differ where images do
    return all(_equal(getattr(one, name), getattr(two, name)) for name in names)


def _equal(one: Tensor | None, two: Tensor | None) -> bool:
    if one is two:
        return True
    return one is not None and two is not None and torch.equal(one, two)


def into_stacks(points: Sequence[Point]) -> list[list[Point]]:
    """The points, in stacks of as many as the engine trains clients at once, or alone."""
    alike_points: list[list[Point]] = []
    for point in points:
        fitting = [group for group in alike_points if _fits(group[0].setup, point.setup)]
        if fitting:
            fitting[0].append(point)
        else:
            alike_points.append([point])
    stacks = []
    for group in alike_points:
        cohort = max(point.setup.experiment.clients.cohort for point in group)
        most = max(group[0].setup.engine.clients_at_once // cohort, 1)
        count = -(-len(group) // most)
        stacks += [
            group[len(group) * i // count : len(group) * (i + 1) // count] for i in range(count)
        ]
    return stacks


def _fits(one: Setup, two: Setup) -> bool:
    """Whether the clients of two points can train as one cohort."""
    keys = [f.name for f in fields(Experiment) if f.name not in MAY_DIFFER]
    a, b = one.program.algorithm, two.program.algorithm
    return (
        isinstance(one.engine, Stacked)
        and isinstance(two.engine, Stacked)
        and one.federation.examples is two.federation.examples
        and all(getattr(one.experiment, key) == getattr(two.experiment, key) for key in keys)
        and alike((a.objective, a.solve), (b.objective, b.solve))
        and (a.carries, a.personal_norm) == (b.carries, b.personal_norm)
        and (a.pace, b.pace) == (None, None)
        and one.program.guarded == two.program.guarded
        and _same_tree(one.network.frozen, two.network.frozen)
        and _kept_by(one) == _kept_by(two)
    )


def _same_tree(one: Tree, two: Tree) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def _kept_by(setup: Setup) -> Any:
    """What the server tells clients and what they remember, by name and shape."""
    state = begin(setup.network, setup.program, setup.federation, setup.device)
    memory = setup.program.memory(state.params, state.buffers, state.told)
    return [
        {name: {key: t.shape for key, t in tree.items()} for name, tree in kept.items()}
        for kept in (state.told, memory, {"model": state.params | state.buffers})
    ]
