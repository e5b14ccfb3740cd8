"""The points of a sweep: how each is built and opened, and which train side by side.

Points are stacked if they differ only in seeds and numbers and their engine is `stacked`: their
clients then train as one cohort, each with the model, data and numbers of its own point. A cohort
of ten clients leaves most of a GPU idle; the cohorts of six points together do not. All other
points run one after another. The results are the same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedlens.algorithm import same_but_numbers
from fedlens.config.experiment import Experiment, Named
from fedlens.config.sections import Evaluate
from fedlens.core import Plan, Tree, keys
from fedlens.core.federation import Dataset, Examples
from fedlens.data.places import Counted
from fedlens.engines import Stacked
from fedlens.engines.stacked import SHARE, memory_of
from fedlens.rounds import begin
from fedlens.runs.folder import OnChange, RunFolder
from fedlens.runs.loop import ActiveRun, run_to_end
from fedlens.runs.manifest import check_settings
from fedlens.runs.progress import Watch
from fedlens.runs.result import Result
from fedlens.runs.run import reopen, start
from fedlens.setup import Setup, build
from fedlens.setup.network import Networks
from fedlens.storage.run_files import last_saved, read_manifest

MAY_DIFFER = {
    *("dataset", "engine", "device"),  # what they result in is compared instead
    *("rounds", "seed", "loss", "clients", "local", "server", "evaluate", "algorithm", "stop"),
    *("faults", "reporting", "privacy", "attack"),
}
"""Keys in which stacked points may differ, as long as their clients do the same operations."""

MOST = 512
"""Maximum clients of a stack on a GPU. With more clients, the GPU waits less between kernels and
for the few clients that train longest; but no point finishes long before the others."""
A_PARAMETER = 48
"""Bytes of memory per parameter of a client: weights, their copies, gradients, momentum and
activations took 30 for ResNet-18, and captured CUDA graphs have memory of their own."""
AN_UPLOAD = 48
"""Bytes more if the server keeps all uploads until it combines them: the full update in float64,
also of layers that could otherwise stay factored, and what a combine computes from it. FedNS took
96 in all."""


@dataclass(frozen=True)
class Point:
    name: str
    experiment: Experiment
    setup: Setup
    folder: Path | None
    overwrite: bool
    on_change: OnChange | None = None  # called after each change to its folder

    @property
    def begun(self) -> Path | None:
        """Its folder, if the point is resumed from there."""
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
        folder = RunFolder.open(self.begun, self.on_change)
        try:
            check_settings(folder.path, self.experiment, read_manifest(folder.path))
            return reopen(folder, self.setup, watch)
        except BaseException:
            folder.close()
            raise


def run_stacks(
    stacks: Sequence[Sequence[Point]], watch_of: Callable[[Point], Watch | None], keep_states: bool
) -> Iterator[tuple[Point, Result]]:
    """Run stacks one after another; yield each point with its result."""
    for stack in stacks:
        if len(stack) > 1:
            _train_at_once(stack)
        with contextlib.ExitStack() as opened:
            runs = []
            for point in stack:
                runs.append(point.open(watch_of(point)))
                opened.callback(runs[-1].close)
            yield from zip(stack, run_to_end(runs, keep_states), strict=True)


def _train_at_once(stack: Sequence[Point]) -> None:
    """Let engines train all clients of a stack at once: captures for fewer would be lost.

    The engine of the first point trains them all; the others only describe their points.
    """
    clients = sum(point.setup.experiment.clients.cohort for point in stack)
    for engine in (point.setup.engine for point in stack):
        assert isinstance(engine, Stacked)
        engine.at_once = max(engine.at_once, clients)


def build_point(
    experiment: Experiment,
    data: Path | None,
    loaded: dict[str, Dataset],
    watch: Counted | None = None,
    networks: Networks | None = None,
) -> Setup:
    """The setup of a point; data sets and networks that points share are loaded or built once."""
    given = experiment.dataset
    if not isinstance(given, Named):
        return build(experiment, data)
    known = loaded.get(repr(given))
    if known is None:
        setup = build(experiment, data, watch=watch, networks=networks)
        loaded[repr(given)] = setup.dataset
        return setup
    setup = build(replace(experiment, dataset=known), data, networks=networks)
    return replace(setup, experiment=replace(setup.experiment, dataset=given))


def sharing(setup: Setup, points: Sequence[Point]) -> Setup:
    """`setup` with the examples of an earlier point, if they are equal to its own."""
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
    names = ["labels", *others]  # labels first: they are small, and differ if images do
    return all(_equal(getattr(one, name), getattr(two, name)) for name in names)


def _equal(one: Tensor | None, two: Tensor | None) -> bool:
    if one is two:
        return True
    return one is not None and two is not None and torch.equal(one, two)


def into_stacks(points: Sequence[Point]) -> list[list[Point]]:
    """The points in stacks of at most as many clients as train at once, or alone.

    A round of a stack takes as long as its longest client, so points with similar ones are grouped.
    """
    alike_points: list[tuple[Any, list[Point]]] = []
    for point in points:
        kept = _kept_by(point.setup) if isinstance(point.setup.engine, Stacked) else None
        for other, group in alike_points:
            if kept is not None and other == kept and _fits(group[0].setup, point.setup):
                group.append(point)
                break
        else:
            alike_points.append((kept, [point]))
    return [stack for _, group in alike_points for stack in _divided(group)]


def _divided(points: list[Point]) -> list[list[Point]]:
    """Compatible points in stacks of about equal numbers of clients, at most those at once."""
    setup = points[0].setup
    most = setup.engine.at_once
    if setup.device.type == "cuda":
        keeps = any(not point.setup.program.algorithm.sums_parts for point in points)
        most = on_a_gpu(memory_of(setup.device), setup.network.num_parameters, keeps_uploads=keeps)
    total = sum(point.setup.experiment.clients.cohort for point in points)
    share = total / -(-total // most)  # clients per stack
    stacks: list[list[Point]] = [[]]
    filled, before = 0, 0  # clients in the last stack, and in all
    for point in sorted(points, key=_longest):
        cohort = point.setup.experiment.clients.cohort
        has_its_share = before + cohort / 2 > share * len(stacks)
        if stacks[-1] and (filled + cohort > most or has_its_share):
            stacks.append([])
            filled = 0
        stacks[-1].append(point)
        filled, before = filled + cohort, before + cohort
    return stacks


def on_a_gpu(memory: int, num_parameters: int, *, keeps_uploads: bool) -> int:
    """An estimate of how many clients a GPU with this many bytes of memory can train at once."""
    each = A_PARAMETER + (AN_UPLOAD if keeps_uploads else 0)
    return max(1, min(MOST, int(SHARE * memory) // (each * num_parameters)))


def _longest(point: Point) -> int:
    """Examples that the largest client processes in a round."""
    setup = point.setup
    held = setup.federation.described().sizes
    return setup.program.algorithm.draw.plan_size(int(held.max()))


def _fits(one: Setup, two: Setup) -> bool:
    """Whether clients of two points with equal `_kept_by` can train as one cohort."""
    keys = [f.name for f in fields(Experiment) if f.name not in MAY_DIFFER]
    a, b = one.program.algorithm, two.program.algorithm
    return (
        one.federation.examples is two.federation.examples
        and all(getattr(one.experiment, key) == getattr(two.experiment, key) for key in keys)
        and same_but_numbers((a.objective, a.solve), (b.objective, b.solve))
        and (a.carries, a.personal) == (b.carries, b.personal)
        and (a.pace, b.pace) == (None, None)
        and one.program.measures_norm == two.program.measures_norm
        and _same_tree(one.network.frozen, two.network.frozen)
    )


def _same_tree(one: Tree, two: Tree) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def _kept_by(setup: Setup) -> Any:
    """Names and shapes of what the server sends, what clients remember, and the model."""
    state = begin(setup.network, setup.program, setup.federation, setup.device)
    memory = setup.program.memory(state.params, state.buffers, state.told)
    return [
        {name: {key: t.shape for key, t in tree.items()} for name, tree in kept.items()}
        for kept in (state.told, memory, {"model": state.params | state.buffers})
    ]


A_STEP = 3  # a training step takes about as long as this many forward passes


def drawn_plan(setup: Setup, round: int) -> Plan:
    """A plan that a round could have. The run uses other random keys, so draws another plan."""
    federation, algorithm = setup.federation, setup.program.algorithm
    key = keys.root(setup.experiment.seed, keys.purpose("estimate"), round)
    clients = algorithm.select(federation, round, key)
    return algorithm.draw(federation.holdings(round, clients), keys.fold(key, clients))


def images_a_round(setup: Setup) -> float:
    """Images that a round passes through the model, in forward passes, evaluations included.

    The time of a round of one model is about proportional to this number.
    """
    experiment, plan = setup.experiment, drawn_plan(setup, 0)
    trained = float(plan.counts.sum())
    if (pace := setup.program.algorithm.pace) is not None:  # a round takes only some of the updates
        trained *= pace.buffer / len(plan.counts)
    evaluations = num_evaluations(experiment.evaluate, experiment.rounds)
    tested = sum(map(len, setup.parts.values()))
    return A_STEP * trained + tested * evaluations / experiment.rounds


def num_evaluations(evaluate: Evaluate, rounds: int) -> int:
    """The number of evaluations of a run of this many rounds (`Evaluate.is_due`)."""
    others = {at for at in (*evaluate.at, rounds) if 0 < at <= rounds and at % evaluate.every}
    return rounds // evaluate.every + len(others)
