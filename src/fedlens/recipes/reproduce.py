"""Reproducing a recipe: its cells are run, finished ones are kept, and a page is drawn."""

from __future__ import annotations

import fnmatch
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedlens.config.experiment import Experiment
from fedlens.recipes import RECIPES, ScaleName, check_known, slug
from fedlens.recipes.experiments import experiments
from fedlens.recipes.page import led_by_a_figure, opening
from fedlens.recipes.recipe import FROM_CELL, Recipe, Results, Scale, with_settings
from fedlens.recipes.together import Cells, Together
from fedlens.report.artists import Artists, Drawing
from fedlens.report.page import render_page
from fedlens.runs.equal import is_run_of
from fedlens.runs.records import read
from fedlens.runs.watching import Watch
from fedlens.storage.locks import FolderLock
from fedlens.storage.run_files import MODEL, OVER, is_run, read_status

if TYPE_CHECKING:
    from fedlens.report.blocks import Block


@dataclass(frozen=True)
class Reproduction:
    """A recipe at a scale, ready to be run."""

    name: str  # paper/item
    scale: Scale
    recipe: Recipe
    out: Path
    cells: Cells  # every cell with every seed
    chosen: frozenset[Path]  # the folders of the selected cells

    @property
    def left(self) -> Cells:
        """The selected cells that are not done yet."""
        cells = {place: self.cells[place] for place in self.cells if place in self.chosen}
        return {place: cell for place, cell in cells.items() if read_status(place) not in OVER}


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
    if only:
        _check_some_match(recipes.values(), only)
        recipes = {name: one for name, one in recipes.items() if _matching(one, only)}
    planned = []
    for name, recipe in recipes.items():
        if out is not None and len(names) == 1:
            folder = Path(out)
        else:
            folder = Path(out or "reproductions") / f"{name}-{scale}"
        if seeds is not None:
            recipe = replace(recipe, seeds=range(seeds))
        planned.append(_planned(name, at, recipe, folder, overrides, only))
    places = {place: cell for one in planned for place, cell in one.cells.items()}
    for place, experiment in places.items():
        if place.exists() and not overwrite and not _is_of(place, experiment):
            raise ValueError(
                f"{place} is a run of another experiment: choose another --out, or add --overwrite"
            )
    if overwrite:
        for place in places:
            if is_run(place):
                with FolderLock(place):
                    shutil.rmtree(place)
    return planned


def _planned(
    name: str,
    scale: Scale,
    recipe: Recipe,
    folder: Path,
    overrides: Sequence[str],
    only: Sequence[str],
) -> Reproduction:
    cells = {}
    for cell, changed in with_settings(recipe, overrides).cells.items():
        for seed in recipe.seeds:
            weights = changed.weights
            if weights is not None and weights.startswith(FROM_CELL):
                start = place_of(folder, weights.removeprefix(FROM_CELL), seed, recipe)
                weights = str(start.resolve() / MODEL)
            place = place_of(folder, cell, seed, recipe)
            is_new = (changed.seed, changed.weights) != (seed, weights)
            # Replacing checks the experiment again: a millisecond each, for maybe thousands.
            cells[place] = replace(changed, seed=seed, weights=weights) if is_new else changed
    wanted = _matching(recipe, only) if only else list(recipe.cells)
    chosen = {place_of(folder, cell, seed, recipe) for cell in wanted for seed in recipe.seeds}
    return Reproduction(name, scale, recipe, folder, cells, frozenset(chosen))


def _check_some_match(recipes: Iterable[Recipe], patterns: Sequence[str]) -> None:
    cells = [cell for recipe in recipes for cell in recipe.cells]
    for pattern in patterns:
        if not fnmatch.filter(cells, pattern):
            some = "; ".join(cells[:3])
            raise ValueError(f"no experiment is called {pattern!r}: there are {some}, and so on")


def _matching(recipe: Recipe, patterns: Sequence[str]) -> list[str]:
    return [cell for cell in recipe.cells if any(fnmatch.fnmatch(cell, p) for p in patterns)]


def together(planned: Sequence[Reproduction]) -> Together:
    """The runs of tables and figures as one sweep, which runs equal experiments once."""
    return Together(
        outs=[one.out for one in planned],
        cells={place: cell for one in planned for place, cell in one.cells.items()},
        chosen=[place for one in planned for place in one.cells if place in one.chosen],
        names={
            place: place.name if len(planned) == 1 else f"{one.name}/{place.name}"
            for one in planned
            for place in one.cells
        },
        data=planned[0].scale.data,
    )


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
    together([planned]).run(watch)
    return show(planned)


def show(
    planned: Reproduction, watch: Drawing | None = None, artists: Artists | None = None
) -> Reproduced:
    """Draw the page of a reproduction from the runs that are done."""
    recipe, results = planned.recipe, results_of(planned)
    blocks = blocks_of(recipe, results)
    return draw(planned.name, recipe, results, blocks, planned.out, watch, artists)


def results_of(planned: Reproduction) -> Results:
    """The runs of a reproduction that are done."""
    recipe, runs = planned.recipe, {}
    for cell in recipe.cells:
        places = [place_of(planned.out, cell, seed, recipe) for seed in recipe.seeds]
        if done := [read(place) for place in places if read_status(place) in OVER]:
            runs[cell] = done
    return Results(planned.scale, runs)


def draw(
    name: str,
    recipe: Recipe,
    results: Results,
    blocks: Sequence[Block],
    out: Path,
    watch: Drawing | None = None,
    artists: Artists | None = None,
) -> Reproduced:
    """Draw the page of a recipe from its blocks."""
    page = render_page(f"{name}: {recipe.title}", recipe.about, blocks, out, watch, artists)
    return Reproduced(page, results, blocks)


def blocks_of(recipe: Recipe, results: Results) -> list[Block]:
    """The blocks of a recipe's page."""
    blocks = led_by_a_figure(recipe.blocks(results), opening(recipe, results))
    return [*blocks, experiments(results)] if recipe.cells else blocks


def place_of(out: Path, cell: str, seed: int, recipe: Recipe) -> Path:
    """The folder of one run: the name of the cell and, if there are several seeds, the seed."""
    name = slug(cell)
    return out / "runs" / (f"{name}-seed{seed}" if len(recipe.seeds) > 1 else name)


def _is_of(place: Path, experiment: Experiment) -> bool:
    return is_run(place) and is_run_of(place, experiment)
