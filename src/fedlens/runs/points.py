"""The points of a sweep: how each is made and opened, and which train side by side.

Points are stacked if they differ in seeds and numbers alone and their engine is `stacked`: their
clients then train as one cohort, each with the model, the data and the numbers of its own point.
A cohort of ten leaves most of a GPU idle; the cohorts of six points together do not. All others
run one after another. The results are the same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedlens.algorithm import alike
from fedlens.core import Tree
from fedlens.data.places import Counted
from fedlens.engines import Stacked
from fedlens.experiment import Experiment, Named
from fedlens.federation import Dataset, Examples
from fedlens.rounds import begin
from fedlens.run_files import last_saved, read_manifest
from fedlens.runs.active import ActiveRun, Watch, run_to_end
from fedlens.runs.folder import RunFolder, Tell
from fedlens.runs.manifest import check_settings
from fedlens.runs.result import Result
from fedlens.runs.run import reopen, start
from fedlens.setup import Setup, build

MAY_DIFFER = {
    *("dataset", "engine", "device"),  # of which the outcome is compared
    *("rounds", "seed", "loss", "clients", "local", "server", "evaluate", "algorithm", "stop"),
    *("faults", "reporting"),
}
"""Keys in which stacked points may differ, as long as what their clients do is alike."""


@dataclass(frozen=True)
class Point:
    name: str
    experiment: Experiment
    setup: Setup
    folder: Path | None
    overwrite: bool
    tell: Tell | None = None  # of what is written into the folder

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
        folder = RunFolder.open(self.begun, self.tell)
        try:
            check_settings(folder.path, self.experiment, read_manifest(folder.path))
            return reopen(folder, self.setup, watch)
        except BaseException:
            folder.close()
            raise


def run_stacks(
    stacks: Sequence[Sequence[Point]],
    watch_of: Callable[[Point], Watch | None],
    keep_states: bool,
) -> Iterator[tuple[Point, Result]]:
    """Run points to their results, one stack after another."""
    for stack in stacks:
        with contextlib.ExitStack() as opened:
            runs = []
            for point in stack:
                runs.append(point.open(watch_of(point)))
                opened.callback(runs[-1].close)
            yield from zip(stack, run_to_end(runs, keep_states), strict=True)


def build_point(
    experiment: Experiment,
    data: str | Path | None,
    loaded: dict[str, Dataset],
    watch: Counted | None = None,
) -> Setup:
    """The parts of a point; a data set that several points name is loaded once."""
    data, given = Path(data) if data is not None else None, experiment.dataset
    if not isinstance(given, Named):
        return build(experiment, data)
    known = loaded.get(repr(given))
    if known is None:
        setup = build(experiment, data, watch=watch)
        loaded[repr(given)] = setup.dataset
        return setup
    setup = build(replace(experiment, dataset=known), data)
    return replace(setup, experiment=replace(setup.experiment, dataset=given))


def sharing(setup: Setup, points: Sequence[Point]) -> Setup:
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
    """The points, in stacks of as many as the engine trains clients at once, or alone.

    A round of a stack takes as long as its longest client: those with long ones stand together.
    """
    alike_points: list[list[Point]] = []
    for point in points:
        fitting = [group for group in alike_points if _fits(group[0].setup, point.setup)]
        if fitting:
            fitting[0].append(point)
        else:
            alike_points.append([point])
    stacks = []
    for group in alike_points:
        group.sort(key=_longest)
        cohort = max(point.setup.experiment.clients.cohort for point in group)
        most = max(group[0].setup.engine.clients_at_once // cohort, 1)
        count = -(-len(group) // most)
        stacks += [
            group[len(group) * i // count : len(group) * (i + 1) // count] for i in range(count)
        ]
    return stacks


def _longest(point: Point) -> int:
    """Examples that the client which holds the most sees in a round."""
    setup = point.setup
    held = setup.federation.described().sizes
    return setup.program.algorithm.draw.plan_size(int(held.max()))


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
