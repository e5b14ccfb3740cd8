"""Reproducing recipes: what is not done yet is run as one sweep, and pages are drawn."""

from __future__ import annotations

import contextlib
import fnmatch
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedlens.config.experiment import Experiment
from fedlens.recipes import RECIPES, ScaleName, check_known, slug
from fedlens.recipes.page import captioned, experiments, led_by_a_figure, opening
from fedlens.recipes.recipe import FROM_CELL, Recipe, Results, Scale, with_settings
from fedlens.report.page import render_page
from fedlens.runs.folder import new_folder
from fedlens.runs.manifest import is_run_of, text_of
from fedlens.runs.progress import Watch, Watching, decoding, inform
from fedlens.runs.records import Record, read
from fedlens.runs.sweep import prepare
from fedlens.storage.locks import LOCK, FolderLock, one_writer, remove_dead_lock
from fedlens.storage.run_files import (
    MODEL,
    OVER,
    is_run,
    last_saved,
    read_manifest,
    read_status,
)
from fedlens.version import __version__

if TYPE_CHECKING:
    from fedlens.report.blocks import Block


AT_ONCE = 64  # runs that are prepared together: each holds a model in memory
Cells = Mapping[Path, Experiment]
"""Experiments by the folders of their runs."""


@dataclass(frozen=True)
class Reproduction:
    """A recipe at a scale, ready to be run."""

    name: str  # paper/item
    scale: Scale
    recipe: Recipe
    out: Path
    cells: Cells  # every cell with every seed
    chosen: Cells  # those that are selected

    @property
    def left(self) -> Cells:
        """The selected cells that are not done yet."""
        return {p: cell for p, cell in self.chosen.items() if read_status(p) not in OVER}


@dataclass(frozen=True)
class Reproduced:
    """The result of a reproduction."""

    page: Path
    results: Results
    blocks: Sequence[Block]


def plan(
    name: str, scale: ScaleName = "small", out: str | Path | None = None, **options: Any
) -> Reproduction:
    """Plan the runs of a table or figure; the options are those of `plan_all`."""
    return plan_all([name], scale, out, **options)[0]


def plan_all(
    names: Iterable[str],
    scale: ScaleName = "small",
    out: str | Path | None = None,
    *,
    data: Path | None = None,
    seeds: int | None = None,
    overrides: Sequence[str] = (),
    overwrite: bool = False,
    only: Sequence[str] = (),
) -> list[Reproduction]:
    """Plan the runs of tables and figures; missing data and other errors are found here.

    `out` is the folder of a single item, or for several items the parent folder in place of
    `reproductions`. `seeds` is the number of seeds per cell, in place of the recipe's own.
    `overrides` are `key=value`, as for `fedlens run`, and change every cell. `only` are patterns of
    cells (`"cifar10, *, K 10"`): other cells are not run, and items without a match are left out.
    """
    names = list(dict.fromkeys(names))
    if not names:
        raise ValueError("no table or figure is named: choose from `fedlens list recipes`")
    for name in names:
        check_known(name)
    if seeds is not None and seeds < 1:
        raise ValueError(f"seeds is {seeds}: choose 1 or more")
    at = Scale(scale, data)
    recipes = {name: RECIPES[name](at) for name in names}
    named = [cell for recipe in recipes.values() for cell in recipe.cells]
    for pattern in only:
        if not fnmatch.filter(named, pattern):
            some = "; ".join(named[:3])
            raise ValueError(f"no experiment is called {pattern!r}: there are {some}, and so on")
    planned = []
    for name, recipe in recipes.items():
        wanted = [cell for cell in recipe.cells if any(fnmatch.fnmatch(cell, p) for p in only)]
        if only and not wanted:
            continue
        folder = Path(out or "reproductions") / f"{name}-{scale}"
        if out is not None and len(names) == 1:
            folder = Path(out)
        recipe = replace(recipe, seeds=recipe.seeds if seeds is None else range(seeds))
        cells = _by_place(with_settings(recipe, overrides), folder)
        places = [
            place_of(folder, cell, seed, recipe)
            for cell in (wanted or recipe.cells)
            for seed in recipe.seeds
        ]
        chosen = {place: cells[place] for place in places}
        planned.append(Reproduction(name, at, recipe, folder, cells, chosen))
    for place, experiment in Together(planned).cells.items():
        if (
            place.exists()
            and not overwrite
            and not (is_run(place) and is_run_of(place, experiment))
        ):
            raise ValueError(
                f"{place} is a run of another experiment: choose another --out, or add --overwrite"
            )
        if overwrite and is_run(place):
            with FolderLock(place):
                shutil.rmtree(place)
    return planned


def _by_place(recipe: Recipe, folder: Path) -> Cells:
    """Every cell of a recipe with every seed."""
    cells = {}
    for cell, changed in recipe.cells.items():
        for seed in recipe.seeds:
            weights = changed.weights
            if weights is not None and weights.startswith(FROM_CELL):
                start = place_of(folder, weights.removeprefix(FROM_CELL), seed, recipe)
                weights = str(start.resolve() / MODEL)
            is_new = (changed.seed, changed.weights) != (seed, weights)
            # Replacing checks the experiment again: a millisecond each, for maybe thousands.
            cells[place_of(folder, cell, seed, recipe)] = (
                replace(changed, seed=seed, weights=weights) if is_new else changed
            )
    return cells


@dataclass(frozen=True)
class Together:
    """The selected cells of several items, which run as one sweep."""

    planned: Sequence[Reproduction]

    @cached_property
    def cells(self) -> Cells:
        return {place: cell for one in self.planned for place, cell in one.cells.items()}

    @cached_property
    def names(self) -> Mapping[Path, str]:
        """The name of each cell in progress reports."""
        return {
            place: place.name if len(self.planned) == 1 else f"{one.name}/{place.name}"
            for one in self.planned
            for place in one.cells
        }

    @property
    def left(self) -> Cells:
        """The cells to run: of equal experiments, if none is done, the one with the most rounds."""
        waiting = (places for places in self._equal if not any(map(self._is_done, places)))
        furthest = (max(places, key=lambda place: last_saved(place) or 0) for places in waiting)
        return {place: self.cells[place] for place in furthest}

    @property
    def stages(self) -> Iterator[Cells]:
        """The cells to run, in parts prepared together; cells that start from another come last."""
        models = {str(place.resolve() / MODEL) for place in self.cells}
        left = self.left
        for depends in (False, True):
            part = [place for place in left if (left[place].weights in models) == depends]
            for start in range(0, len(part), AT_ONCE):
                yield {place: left[place] for place in part[start : start + AT_ONCE]}

    @property
    def count(self) -> int:
        """The number of runs, including those that are done."""
        return len(self._equal)

    @property
    def rounds(self) -> int:
        return sum(self.cells[places[0]].rounds for places in self._equal)

    @property
    def rounds_done(self) -> int:
        return sum(max(map(self._rounds_done, places)) for places in self._equal)

    def _rounds_done(self, place: Path) -> int:
        return self.cells[place].rounds if self._is_done(place) else last_saved(place) or 0

    def _is_done(self, place: Path) -> bool:
        """Whether it was run, here or by another item in a sibling folder."""
        return _is_over(place) or self._texts[place] in self._beside

    @cached_property
    def _texts(self) -> Mapping[Path, str]:
        """The experiments of the selected cells, as text."""
        return {place: one.toml() for item in self.planned for place, one in item.chosen.items()}

    @property
    def _equal(self) -> list[list[Path]]:
        """The selected folders, grouped: folders with one experiment share its run.

        Runs made by another version of Fedlens are never shared.
        """
        found: dict[str, list[Path]] = {}
        for place, text in self._texts.items():
            is_alone = read_status(place) is not None and not _is_ours(place)
            found.setdefault(str(place) if is_alone else text, []).append(place)
        return list(found.values())

    def run(self, watch: Watch | None = None) -> None:
        """Run or resume the remaining cells; `watch` is called as if all were one sweep."""
        with one_writer(*(one.out for one in self.planned)):
            parents = {place.parent for place in self._texts}
            for folder in (*parents, *filter(_is_over, self._texts)):
                remove_dead_lock(folder)  # of a process killed after its last write
            total = self.rounds
            self._take_over()
            while stage := next(self.stages, None):
                self._run_stage(stage, total, watch)
                assert all(map(_is_over, stage)), "a sweep ends its runs"
                self._take_over()

    def _run_stage(self, stage: Cells, total: int, watch: Watch | None) -> None:
        elsewhere = self.rounds_done - sum(map(self._rounds_done, stage))
        later = sum(
            one.rounds - self._rounds_done(place)
            for place, one in self.left.items()
            if place not in stage
        )

        def say(record: Record) -> None:
            if "done" in record:
                done, left = elsewhere + record["done"], later + record["left"]
                record = record | {"done": done, "total": total, "left": left}
            inform(watch, record)

        told = Watching(say) if watch is not None else None
        points = {self.names[place]: experiment for place, experiment in stage.items()}
        folders = {self.names[place]: place for place in stage}
        made = prepare(points, folders, data=self.planned[0].scale.data, watch=decoding(told))
        made.run(told, keep_states=False)

    @cached_property
    def _beside(self) -> Mapping[str, Path]:
        """Finished runs of other items in sibling folders, by the text of their experiment."""
        parents = dict.fromkeys(one.out.parent for one in self.planned)
        others = (other for parent in parents for other in sorted(parent.glob("*/runs/*")))
        return _done(other for other in others if other not in self.cells)

    def _take_over(self) -> None:
        """Copy selected runs that another item, here or in a sibling folder, has finished."""
        wanted = {place: text for place, text in self._texts.items() if not _is_over(place)}
        done = {**self._beside, **_done(self.cells)} if wanted else {}
        how: dict[str, Any] = {"copy_function": _link, "ignore": shutil.ignore_patterns(LOCK)}
        for place, text in wanted.items():
            if text in done:
                copy: Any = partial(shutil.copytree, done[text], dirs_exist_ok=True, **how)
                new_folder(place, copy, overwrite=True).release()


def _done(places: Iterable[Path]) -> dict[str, Path]:
    """Finished runs of this version of Fedlens by the text of their experiment; equal ones once."""
    found: dict[str, Path] = {}
    for place in places:
        with contextlib.suppress(ValueError):  # one of its files is damaged
            if is_run(place) and _is_ours(place) and _is_over(place):
                found.setdefault(text_of(place), place)
    return found


def _is_over(place: Path) -> bool:
    return read_status(place) in OVER


def _is_ours(place: Path) -> bool:
    """Whether a run was started by this version of Fedlens."""
    with contextlib.suppress(ValueError):  # one of its files is damaged
        return read_manifest(place).get("fedlens") == __version__
    return False


def _link(source: str, dest: str) -> None:
    try:
        os.link(source, dest)  # files of a finished run are never modified
    except OSError:
        shutil.copy2(source, dest)


def reproduce(
    name: str,
    scale: ScaleName = "small",
    out: str | Path | None = None,
    *,
    watch: Watch | None = None,
    **options: Any,
) -> Reproduced:
    """Run the rest of a table or figure, and draw its page; the options are those of `plan`."""
    planned = plan(name, scale, out, **options)
    Together([planned]).run(watch)
    return show(planned)


def show(planned: Reproduction, progress: bool = False) -> Reproduced:
    """Draw the page of a reproduction from the runs that are done."""
    recipe, runs = planned.recipe, {}
    for cell in recipe.cells:
        places = [place_of(planned.out, cell, seed, recipe) for seed in recipe.seeds]
        if done := [read(place) for place in places if _is_over(place)]:
            runs[cell] = done
    results = Results(planned.scale, runs)
    blocks = blocks_of(recipe, results)
    return draw(planned.name, recipe, results, blocks, planned.out, progress)


def draw(
    name: str,
    recipe: Recipe,
    results: Results,
    blocks: Sequence[Block],
    out: Path,
    progress: bool = False,
) -> Reproduced:
    """Draw the page of a recipe from its blocks."""
    page = render_page(f"{name}: {recipe.title}", recipe.about, blocks, out, progress)
    return Reproduced(page, results, blocks)


def blocks_of(recipe: Recipe, results: Results) -> list[Block]:
    """The blocks of a recipe's page."""
    shown = [captioned(block, recipe.captions) for block in recipe.blocks(results)]
    blocks = led_by_a_figure(shown, opening(recipe, results))
    return [*blocks, experiments(results)] if recipe.cells else blocks


def place_of(out: Path, cell: str, seed: int, recipe: Recipe) -> Path:
    """The folder of one run: the name of the cell and, if there are several seeds, the seed."""
    name = slug(cell)
    return out / "runs" / (f"{name}-seed{seed}" if len(recipe.seeds) > 1 else name)
