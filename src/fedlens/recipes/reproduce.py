"""Reproducing: the cells of a recipe are run, those that are done are kept, and a page is drawn."""

from __future__ import annotations

import contextlib
import fnmatch
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedlens.experiment import Experiment
from fedlens.locks import LOCK, FolderLock, one_writer
from fedlens.options import did_you_mean
from fedlens.recipes import RECIPES, ScaleName
from fedlens.recipes.described import experiments
from fedlens.recipes.page import led_by_a_figure, opening
from fedlens.recipes.recipe import FROM_CELL, Recipe, Results, Scale
from fedlens.report.artists import Artists, Drawing
from fedlens.report.page import render_page
from fedlens.run_files import (
    MODEL,
    OVER,
    experiment_text,
    is_run,
    last_saved,
    read_manifest,
    read_status,
)
from fedlens.runs.active import Watch
from fedlens.runs.folder import new_folder
from fedlens.runs.records import Run, read
from fedlens.runs.summary import Record
from fedlens.runs.sweep import sweep
from fedlens.tables import apply_override
from fedlens.version import __version__

if TYPE_CHECKING:
    from fedlens.report.blocks import Block

AT_ONCE = 64  # runs that are made ready together: each holds a model in memory
Cells = Mapping[Path, Experiment]
"""Experiments by the folders that their runs are to have."""


@dataclass(frozen=True)
class Reproduction:
    """A recipe at a scale, ready to be run."""

    name: str  # paper/item
    scale: Scale
    recipe: Recipe
    out: Path
    cells: Cells  # every cell with every seed
    chosen: frozenset[Path]  # the folders of those that are wanted

    @property
    def left(self) -> Cells:
        """The cells that are wanted and not done yet."""
        cells = {place: self.cells[place] for place in self.cells if place in self.chosen}
        return {place: cell for place, cell in cells.items() if read_status(place) not in OVER}

    @property
    def stages(self) -> Iterator[Cells]:
        """What is left, in parts that can be made ready at once: first what others start from."""
        models = {str(place.resolve() / MODEL) for place in self.cells}
        left = self.left
        for depends in (False, True):
            part = [place for place in left if (left[place].weights in models) == depends]
            for start in range(0, len(part), AT_ONCE):
                yield {place: left[place] for place in part[start : start + AT_ONCE]}

    @property
    def rounds(self) -> int:
        return sum(self.cells[place].rounds for place in self.chosen)

    @property
    def rounds_done(self) -> int:
        return sum(_rounds_done(place, self.cells[place]) for place in self.chosen)


@dataclass(frozen=True)
class Reproduced:
    """What a reproduction came to."""

    page: Path
    results: Results
    blocks: Sequence[Block]


def plan(
    name: str,
    scale: ScaleName = "small",
    out: str | Path | None = None,
    *,
    data: str | Path | None = None,
    seeds: int | None = None,
    overrides: Sequence[str] = (),
    overwrite: bool = False,
    only: Sequence[str] = (),
) -> Reproduction:
    """What has to be run for a table or figure; missing data and other mistakes are found here.

    `seeds` is how many there are of each cell, in place of the recipe's own number. `overrides`
    are `key=value`, as for `fedlens run`, and change every cell. `only` are patterns of cells
    (`"cifar10, *, K 10"`): the others are not run.
    """
    if name not in RECIPES:
        raise ValueError(f"unknown recipe {name!r}: {did_you_mean(name, RECIPES)}")
    at = Scale(scale, Path(data) if data is not None else None)
    recipe = RECIPES[name](at)
    if seeds is not None:
        if seeds < 1:
            raise ValueError(f"seeds is {seeds}: choose 1 or more")
        recipe = replace(recipe, seeds=range(seeds))
    folder = Path(out) if out is not None else Path("reproductions") / f"{name}-{scale}"
    cells = {}
    for cell, experiment in recipe.cells.items():
        changed = _overridden(experiment, overrides)
        for seed in recipe.seeds:
            weights = changed.weights
            if weights is not None and weights.startswith(FROM_CELL):
                start = place_of(folder, weights.removeprefix(FROM_CELL), seed, recipe)
                weights = str(start.resolve() / MODEL)
            place = place_of(folder, cell, seed, recipe)
            cells[place] = replace(changed, seed=seed, weights=weights)
    for place, experiment in cells.items():
        if place.exists() and not overwrite and not _is_of(place, experiment):
            raise ValueError(
                f"{place} is a run of another experiment: choose another --out, or add --overwrite"
            )
    if overwrite:
        for place in cells:
            if is_run(place):
                with FolderLock(place):
                    shutil.rmtree(place)
    wanted = _matching(recipe, only) if only else list(recipe.cells)
    chosen = {place_of(folder, cell, seed, recipe) for cell in wanted for seed in recipe.seeds}
    return Reproduction(name, at, recipe, folder, cells, frozenset(chosen))


def _matching(recipe: Recipe, patterns: Sequence[str]) -> list[str]:
    for pattern in patterns:
        if not fnmatch.filter(recipe.cells, pattern):
            some = "; ".join(list(recipe.cells)[:3])
            raise ValueError(f"no experiment is called {pattern!r}: there are {some}, and so on")
    return [cell for cell in recipe.cells if any(fnmatch.fnmatch(cell, p) for p in patterns)]


def reproduce(
    name: str,
    scale: ScaleName = "small",
    out: str | Path | None = None,
    *,
    watch: Watch | None = None,
    **options: Any,
) -> Reproduced:
    """Run what is left of a table or figure, and draw its page; the options are those of `plan`."""
    planned = plan(name, scale, out, **options)
    run_cells(planned, watch)
    return show(planned)


def run_cells(planned: Reproduction, watch: Watch | None = None) -> None:
    """Run what is left of the cells, side by side where a sweep can, or go on with them.

    `watch` is called as by `fedlens.runs.sweep.sweep`, as if all cells were one sweep.
    """
    with one_writer(planned.out):
        _run_cells(planned, watch)


def _run_cells(planned: Reproduction, watch: Watch | None) -> None:
    _take_over({p: cell for p, cell in planned.left.items() if read_status(p) is None}, planned.out)
    for stage in planned.stages:
        elsewhere = planned.rounds_done - sum(_rounds_done(*cell) for cell in stage.items())

        def say(record: Record, elsewhere: int = elsewhere) -> None:
            assert watch is not None
            if "done" in record:
                done = elsewhere + record["done"]
                record = record | {"done": done, "total": planned.rounds}
            watch(record)

        points = {place.name: experiment for place, experiment in stage.items()}
        folder = next(iter(stage)).parent
        sweep(
            points,
            folder,
            data=planned.scale.data,
            watch=say if watch else None,
            keep_states=False,
            progress=False,
        )


def show(
    planned: Reproduction, watch: Drawing | None = None, artists: Artists | None = None
) -> Reproduced:
    """Draw the page of a reproduction: of the runs that are done."""
    recipe, runs = planned.recipe, {}
    for cell in recipe.cells:
        places = [place_of(planned.out, cell, seed, recipe) for seed in recipe.seeds]
        if done := [read(place) for place in places if read_status(place) in OVER]:
            runs[cell] = done
    return draw(planned.name, planned.scale, recipe, runs, planned.out, watch, artists)


def draw(
    name: str,
    scale: Scale,
    recipe: Recipe,
    runs: Mapping[str, Sequence[Run]],
    out: Path,
    watch: Drawing | None = None,
    artists: Artists | None = None,
) -> Reproduced:
    """Draw the page of a recipe from its runs, by cell."""
    results = Results(scale, runs)
    blocks = blocks_of(recipe, results)
    page = render_page(f"{name}: {recipe.title}", recipe.about, blocks, out, watch, artists)
    return Reproduced(page, results, blocks)


def blocks_of(recipe: Recipe, results: Results) -> list[Block]:
    """What the page of a recipe is made of."""
    blocks = led_by_a_figure(recipe.blocks(results), opening(recipe, results))
    return [*blocks, experiments(results)] if recipe.cells else blocks


def place_of(out: Path, cell: str, seed: int, recipe: Recipe) -> Path:
    """The folder of one run: the cell's name and, where there are several, its seed."""
    name = slug(cell)
    return out / "runs" / (f"{name}-seed{seed}" if len(recipe.seeds) > 1 else name)


def slug(cell: str) -> str:
    """A cell's name as that of a folder."""
    spelled = cell.lower().replace("α", "alpha").replace("λ", "lambda")
    return re.sub(r"[^a-z0-9.]+", "-", spelled).strip("-.")


def _rounds_done(place: Path, cell: Experiment) -> int:
    if read_status(place) in OVER:
        return cell.rounds
    return last_saved(place) or 0


def _overridden(experiment: Experiment, overrides: Sequence[str]) -> Experiment:
    tables = experiment.plain()
    for override in overrides:
        apply_override(tables, override)
    return Experiment.of(tables)


def _is_of(place: Path, experiment: Experiment) -> bool:
    return is_run(place) and experiment_text(place) == experiment.toml()


def _take_over(cells: Mapping[Path, Experiment], out: Path) -> None:
    """Those cells that another item beside this one has run become this one's, too."""
    if not cells:
        return
    of_text: dict[str, list[Path]] = {}
    for other in sorted(out.parent.glob("*/runs/*")):
        if is_run(other):
            of_text.setdefault(experiment_text(other), []).append(other)
    for place, experiment in cells.items():
        same = next(filter(_is_ours, of_text.get(experiment.toml(), [])), None)
        if same is not None:
            copy = partial(
                shutil.copytree,
                same,
                dirs_exist_ok=True,
                copy_function=_link,
                ignore=shutil.ignore_patterns(LOCK),
            )
            new_folder(place, copy).release()


def _is_ours(place: Path) -> bool:
    """Whether a run was finished by the Fedlens that is running now."""
    with contextlib.suppress(ValueError):  # a file of it is damaged
        return read_status(place) in OVER and read_manifest(place).get("fedlens") == __version__
    return False


def _link(source: str, dest: str) -> None:
    try:
        os.link(source, dest)  # nobody writes into a file of a finished run
    except OSError:
        shutil.copy2(source, dest)
