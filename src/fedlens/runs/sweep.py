"""A sweep: several experiments that belong together.

`points.py` selects those that train side by side. All others run one after another or, on engine
`ray`, in parallel on the machines of a cluster (`spread.py`). The results are the same.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

from fedlens.config.experiment import Experiment, expect_experiment
from fedlens.core.federation import Dataset
from fedlens.data.places import Counted
from fedlens.engines import Stacked
from fedlens.runs.folder import check_free
from fedlens.runs.grid import naming
from fedlens.runs.manifest import is_run_of
from fedlens.runs.points import Point, build_point, images_a_round, into_stacks, run_stacks, sharing
from fedlens.runs.progress import (
    Watch,
    Watching,
    all_of,
    counted,
    decoding,
    expect_watch,
    in_rounds,
    inform,
    is_outside,
    shown,
)
from fedlens.runs.records import Record
from fedlens.runs.result import Result
from fedlens.runs.run import as_begun, say_beforehand
from fedlens.runs.spread import Spread, SpreadPoints
from fedlens.setup.network import Networks
from fedlens.storage import run_files
from fedlens.storage.locks import one_writer, remove_dead_lock
from fedlens.storage.reading import shortened
from fedlens.storage.words import count_of

LONGEST_NAME = 245  # bytes; a new folder's temporary name is a few longer, at most 255


def sweep(
    points: Mapping[str, Experiment],
    out: str | Path | None = None,
    *,
    overwrite: bool = False,
    data: str | Path | None = None,
    watch: Watch | None = None,
    keep_states: bool = True,
    progress: bool | None = None,
) -> dict[str, Result]:
    """Run experiments that belong together, each to the result it would have alone.

    Each has its run folder in `out`, under its name. An existing run is kept if it is finished, and
    resumed if it is not. `watch` is called with each record, extended by its point (`point`), the
    rounds done and in all (`done`, `total`), and the work left (`left`), in rounds of average
    length. Without `keep_states` finished points keep no checkpoint: the memory of clients may be
    gigabytes, and is needed only for more rounds. `progress` is as in `run`.
    """
    if not isinstance(points, Mapping):
        raise ValueError(
            f"sweep is given {type(points).__name__}: give experiments by name, as a dict"
        )
    for one in points.values():
        expect_experiment(one, "sweep")
    expect_watch(watch, "sweep")
    source = Path(data) if data is not None else None
    with shown(progress, counted, "reading images") as reading:

        def decoded(done: int, total: int) -> None:
            for tell in filter(None, (reading, decoding(watch))):
                tell(done, total)

        made = prepare(points, out, overwrite=overwrite, data=source, watch=decoded)
    name = Path(out).name if out is not None else "sweep"
    with shown(progress, in_rounds, name, made.total, made.done) as bar:
        return made.run(all_of(bar, watch), keep_states)


@dataclass(frozen=True)
class Sweep:
    """A sweep whose points are built and checked."""

    names: tuple[str, ...]
    folders: Mapping[str, Path]  # of the points; empty if nothing is written
    kept: dict[str, Result]  # points that were finished before
    stacks: list[list[Point]]  # points to run
    total: int  # rounds of all points
    data: Path | None = None  # where named data sets are searched first

    @property
    def done(self) -> int:
        """Rounds that need not be run again."""
        return self.total - sum(self._left().values())

    def _left(self) -> dict[str, int]:
        """The rounds left, by point."""
        return {
            point.name: point.experiment.rounds - point.num_saved
            for stack in self.stacks
            for point in stack
        }

    def _weights(self, left: Mapping[str, int]) -> dict[str, float]:
        """The work of a round of each point, relative to an average round."""
        work = {point.name: images_a_round(point.setup) for stack in self.stacks for point in stack}
        whole = sum(number * work[name] for name, number in left.items())
        mean = whole / max(sum(left.values()), 1) or 1.0
        return {name: images / mean for name, images in work.items()}

    def describe(self) -> str:
        """One line: how the points will be run."""
        sizes = [len(stack) for stack in self.stacks]
        if not sizes:
            return f"all {len(self.names)} points are done"
        count = count_of(sum(sizes), "point")
        if self.kept:
            count = f"{len(self.kept)} of {len(self.names)} points are done; {count}"
        first = self.stacks[0][0].setup
        if self._spread.points:
            kind = "GPUs" if first.devices[0].type == "cuda" else "cores"
            return f"{count} spread over the {kind} of the Ray cluster"
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

    @cached_property
    def _spread(self) -> SpreadPoints:
        return SpreadPoints.among([point for stack in self.stacks for point in stack])

    def run(self, watch: Watch | None = None, keep_states: bool = True) -> dict[str, Result]:
        """Run the points."""
        results, left = dict(self.kept), self._left()
        weights = self._weights(left) if watch is not None else {}
        points = [point for stack in self.stacks for point in stack]
        say_beforehand((p.setup for p in points), all(p.folder is not None for p in points))

        def forward(point: Point, record: Record) -> None:
            if "round" in record:
                left[point.name] = point.experiment.rounds - record["round"]
            if watch is not None and not is_outside(record):
                work = sum(number * weights[name] for name, number in left.items())
                done = self.total - sum(left.values())
                # Within a round: the work left of all points, in rounds of this point.
                about = {"rounds": work / (weights[point.name] or 1.0)}
                if "round" in record:
                    about = {"done": done, "total": self.total, "left": work}
                record = record | {"point": point.name, **about}
            inform(watch, record)

        def watch_of(point: Point) -> Watch | None:
            return None if watch is None else Watching(partial(forward, point))

        parents = {folder.parent for folder in self.folders.values()}
        for folder in (*parents, *(self.folders[name] for name in self.kept)):
            remove_dead_lock(folder)  # of a process killed after its last write
        with one_writer(*(parents if self.stacks else ())):
            spread = {point.name for point in self._spread.points}
            here = [stack for stack in self.stacks if stack[0].name not in spread]
            try:
                for point, result in itertools.chain(
                    Spread(self._spread, forward, self.data, keep_states).run() if spread else (),
                    run_stacks(here, watch_of, keep_states),
                ):
                    results[point.name] = result
                    left[point.name] = 0  # a diverged run ends early
            except ValueError as error:
                if len(results) == len(self.kept):
                    raise
                raise run_files.RunFailed(
                    str(error)
                ) from error  # others were run and written before
        return {name: results[name] for name in self.names}


def prepare(
    points: Mapping[str, Experiment],
    out: str | Path | Mapping[str, Path] | None = None,
    *,
    overwrite: bool = False,
    data: Path | None = None,
    watch: Counted | None = None,
) -> Sweep:
    """Build and check every point before the first is run.

    `out` is the parent of all run folders, or gives the folders by name. `watch` is called with
    the number of image files decoded and the total.
    """
    if not points:
        raise ValueError("a sweep needs points: give at least one experiment")
    folders = out if isinstance(out, Mapping) else _folders(points, out)
    kept: dict[str, Result] = {}
    made: list[Point] = []
    loaded: dict[str, Dataset] = {}
    networks = Networks()
    for name, experiment in points.items():
        folder = folders.get(name)
        described = experiment
        if folder is not None and overwrite:
            check_free(folder, overwrite)
        elif folder is not None and folder.exists():
            _check_same(folder, experiment)
            if run_files.read_status(folder) in run_files.OVER:
                kept[name] = Result.read(folder)
                continue
            described = as_begun(experiment, run_files.read_manifest(folder))
        with naming(name):
            setup = build_point(described, data, loaded, watch, networks)
        made.append(Point(name, experiment, sharing(setup, made), folder, overwrite))
    total = sum(experiment.rounds for experiment in points.values())
    return Sweep(tuple(points), folders, kept, into_stacks(made), total, data)


def _folders(names: Iterable[str], out: str | Path | None) -> dict[str, Path]:
    """The folders of points in the folder of a sweep, by name."""
    if out is None:
        return {}
    parent = Path(out)
    if (parent / run_files.EXPERIMENT).exists():
        raise ValueError(f"{parent} is a run: choose another folder for the sweep")
    if parent.exists() and not parent.is_dir():
        raise ValueError(f"{parent} is a file: choose a folder for the sweep")
    for name in names:
        if name in ("", "..") or Path(name).name != name:  # its folder would be outside
            raise ValueError(f"a point is called {name!r}: choose a name that a folder can have")
        if len(os.fsencode(name)) > LONGEST_NAME:
            raise ValueError(
                f"a point is called {shortened(name, 80)}, too long for a folder: give shorter "
                "values, or fewer keys"
            )
    return {name: parent / name for name in names}


def _check_same(folder: Path, experiment: Experiment) -> None:
    if not run_files.is_run(folder):
        raise ValueError(f"{folder} is not a run: choose another folder")
    if not is_run_of(folder, experiment):
        raise ValueError(
            f"{folder} holds another experiment: choose another folder, or add --overwrite"
        )
