"""Pages drawn from stored records of runs; nothing is trained, and nothing of them executed."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import get_args

from fedlens.evaluation.measures import SHARES
from fedlens.recipes import RECIPES, ScaleName, check_known, slug
from fedlens.recipes.page import changed
from fedlens.recipes.recipe import Recipe, Recorded, Results, Scale, with_settings
from fedlens.recipes.reproduce import Reproduced, Reproduction, blocks_of, draw, place_of
from fedlens.recipes.store import (
    INDEX,
    item_of,
    lay_out,
    pack,
    read_index,
    read_packed,
    runs_of,
)
from fedlens.runs.manifest import as_today
from fedlens.runs.progress import counted, shown
from fedlens.runs.records import Run, read, settings
from fedlens.storage.reading import demand_fields, is_file, reading
from fedlens.storage.run_files import EXPERIMENT, MANIFEST, OVER
from fedlens.storage.tables import to_toml

MADE_WITH = ("dataset", "model", "rounds")
Cells = Mapping[str, Sequence[Run]]
"""Runs by the slug of their cell."""


def redraw(
    name: str,
    scale: ScaleName,
    stored: str | Path,
    out: str | Path | None = None,
    *,
    data: Path | None = None,
    progress: bool = False,
) -> Reproduced:
    """Draw the page of a table or figure from records; nothing is trained.

    `stored` is a store with an index, one of its packed files, or a folder of run folders: `runs`
    of a reproduction, or the reproduction. The page shows the cells and seeds that were run; it
    needs data sets only if it shows their images or labels. With `progress`, it is shown how many
    runs are read, and figures drawn.
    """
    with shown(progress, counted, "reading records") as watch:
        recipe, results = restore(name, scale, stored, data, watch)
    with reading(stored):  # records from elsewhere may hold anything
        blocks = blocks_of(recipe, results)
    folder = Path(out) if out is not None else Path("reproductions") / f"{name}-{scale}"
    return draw(name, recipe, results, blocks, folder, progress)


def keep(
    store: Path, name: str, results: Results, overrides: Sequence[str], revision: str | None = None
) -> int:
    """Pack finished runs of a recipe into a store; return how many of its item that then has.

    `overrides` are the settings, as key=value, that the runs have in place of the recipe's.
    """
    recipe = RECIPES[name](results.scale)
    over = {
        cell: done
        for cell, runs in results.runs.items()
        if (done := [run for run in runs if run.status in OVER])
    }
    planned = with_settings(recipe, overrides)
    if unlike := changed(planned, Results(results.scale, over), except_for=("rounds",)):
        raise ValueError(
            f"runs of {name} have {', '.join(unlike)}, and the recipe has not: if that is what was "
            "measured, add it to the command"
        )
    item = item_of(name, overrides)
    command = " ".join(["fedlens reproduce", name, "--scale paper", *overrides])
    return pack(store, item, name, recipe, over, command=command, revision=revision)


def take(store: Path, planned: Reproduction, overrides: Sequence[str]) -> None:
    """Lay out the runs of a store among those of a reproduction, so that only others are run.

    They have no models: a run that starts from the model of one of them needs that to be run again.
    """
    item = item_of(planned.name, overrides)
    if item not in read_index(store):
        return
    for cell, runs in runs_of(store, item).items():
        for run in runs if cell in planned.recipe.cells else ():
            _check(run)
            place = place_of(planned.out, cell, run.manifest["seed"], planned.recipe)
            wanted = planned.cells.get(place)
            if wanted and not place.exists() and wanted.toml() == to_toml(as_today(run.experiment)):
                lay_out(run, place)


def restore(
    name: str,
    scale: ScaleName,
    stored: str | Path,
    data: Path | None = None,
    watch: Callable[..., None] | None = None,
) -> tuple[Recipe, Results]:
    """The recipe of a table or figure, with the stored results of its cells."""
    check_known(name)
    if not RECIPES[name](Scale("smoke")).cells:
        raise ValueError(f"{name} trains nothing and is drawn without records: leave --from out")
    runs = _runs(Path(stored), name, watch)
    every = [run for of_cell in runs.values() for run in of_cell]
    for run in every:
        _check(run)
    weights = [run.manifest["weights"]["source"] for run in every if run.manifest.get("weights")]
    datasets = frozenset(str(settings(run.experiment)["dataset"]) for run in every)
    at = Scale(scale, data, Recorded(datasets, tuple(dict.fromkeys(weights))))
    recipe = RECIPES[name](at)
    slugs = {cell: slug(cell) for cell in recipe.cells}
    found = {cell: runs[called] for cell, called in slugs.items() if called in runs}
    if not found:
        some = slug(next(iter(recipe.cells)))
        raise ValueError(
            f"{stored} has no run of {name}, which would be called {some} and so on: name the "
            "folder of its runs"
        )
    if not _fitting(recipe, runs) and (made_at := _scale_of(name, at, runs)):
        raise ValueError(f"{stored} has runs of the scale {made_at}: add --scale {made_at}")
    if not _fitting(recipe, runs, ("dataset",)):  # runs of another item may have the same names
        run = next(iter(found.values()))[0]
        raise ValueError(
            f"{run.folder.name} in {stored} was trained on {run.experiment['dataset']}, which is "
            f"not what {name} is about: name the folder of its runs"
        )
    if others := runs.keys() - slugs.values():
        raise ValueError(
            f"{stored} has runs that are none of {name}, such as {min(others)}: name the folder "
            "of its own runs"
        )
    results = Results(at, found)
    seeds = sorted({run.manifest["seed"] for run in results.all})
    drawn = f"Drawn from the records in {Path(stored)}; nothing was trained for this page."
    return replace(recipe, seeds=seeds, stand_in=f"{recipe.stand_in} {drawn}".strip()), results


def _check(run: Run) -> None:
    """Refuse a run with impossible numbers, or with code of its own, which is not imported here."""
    with reading(run.folder, "take another copy of the run"):
        for record in (*run.rounds, run.summary.get("final") or {}):
            for name in SHARES & record.keys():
                value = record[name]
                if value is not None and not (isinstance(value, int | float) and 0 <= value <= 1):
                    raise ValueError(f"{name} is {value!r}, not a number from 0 to 1")
        for value in settings(run.experiment).values():
            for word in value if isinstance(value, list) else [value]:
                if OWN_CODE.fullmatch(str(word)):
                    raise ValueError(f"it names code of its own, {word}, which is not run here")


OWN_CODE = re.compile(r"(?!fedlens\.recipes\.)[\w.]+:[\w.]+(?: \+ .*)?")


def _scale_of(name: str, at: Scale, runs: Cells) -> ScaleName | None:
    """The scale that fits most of the runs, if one fits any."""
    fitting: dict[ScaleName, int] = {}
    for scale in get_args(ScaleName):
        with contextlib.suppress(ValueError):  # that scale lacks its data
            fitting[scale] = _fitting(RECIPES[name](replace(at, name=scale)), runs)
    best = max(fitting, key=fitting.__getitem__, default=None)
    return best if best is not None and fitting[best] else None


def _fitting(recipe: Recipe, runs: Cells, keys: Sequence[str] = MADE_WITH) -> int:
    """How many runs have the same values of `keys` as their cells."""
    return sum(
        all(settings(run.experiment).get(key) == planned.get(key) for key in keys)
        for cell, experiment in recipe.cells.items()
        for planned in [settings(experiment.plain())]
        for run in runs.get(slug(cell), ())
    )


def _runs(stored: Path, name: str, watch: Callable[..., None] | None) -> Cells:
    if not (stored / INDEX).is_file() and not is_file(stored):
        return _of_folders(stored, watch)
    if is_file(stored):
        recipe, cells = read_packed(stored)
        if recipe != name:
            raise ValueError(f"{stored} has runs of {recipe}, not of {name}: name another file")
    else:
        cells = runs_of(stored, name)
    count = sum(map(len, cells.values()))
    if watch is not None:
        watch(count, count, "reading records")
    return {slug(cell): runs for cell, runs in cells.items()}


def _of_folders(stored: Path, watch: Callable[..., None] | None) -> Cells:
    """The runs of a reproduction, or of a folder of run folders; those of a cell by seed."""
    folder = stored / "runs" if (stored / "runs").is_dir() else stored
    if not folder.is_dir():
        raise ValueError(f"{stored} is not a folder: name one with the run folders of a recipe")
    places = sorted(place.parent for place in folder.glob(f"*/{EXPERIMENT}"))
    if not places:
        raise ValueError(f"{stored} holds no run: name a folder with the run folders of a recipe")
    found: dict[str, dict[int, Run]] = {}
    for number, place in enumerate(places, 1):
        run = read(place)
        demand_fields(run.manifest, {"seed": int}, place / MANIFEST, "run it again")
        of_cell = found.setdefault(re.sub(r"-seed\d+$", "", place.name), {})
        other = of_cell.setdefault(run.manifest["seed"], run)
        if other is not run:
            raise ValueError(
                f"{other.folder} and {run.folder} have one seed: take one of them away, since a "
                "mean over seeds counts each once"
            )
        if watch is not None:
            watch(number, len(places), "reading records")
    return {called: [runs[seed] for seed in sorted(runs)] for called, runs in found.items()}
