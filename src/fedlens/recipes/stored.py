"""Pages drawn from the records that an earlier reproduction left."""

from __future__ import annotations

import gzip
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from fedlens.options import did_you_mean
from fedlens.recipes import RECIPES, ScaleName
from fedlens.recipes.recipe import Recorded, Scale
from fedlens.recipes.reproduce import Reproduced, draw, slug
from fedlens.runs.records import Run, read, settings

ROUNDS, PACKED = "rounds.jsonl", "rounds.jsonl.gz"


def redraw(
    name: str,
    scale: ScaleName,
    stored: str | Path,
    out: str | Path | None = None,
    *,
    data: str | Path | None = None,
) -> Reproduced:
    """Draw the page of a table or figure from records; nothing is trained.

    `stored` holds run folders as `runs` of a reproduction does, or is that reproduction's own
    folder. Rounds may be packed, as rounds.jsonl.gz. A page needs data only where it shows them.
    """
    if name not in RECIPES:
        raise ValueError(f"unknown recipe {name!r}: {did_you_mean(name, RECIPES)}")
    runs = _runs(Path(stored))
    at = Scale(scale, Path(data) if data is not None else None, _used(list(runs.values())))
    recipe = RECIPES[name](at)
    if not recipe.cells:
        raise ValueError(f"{name} trains nothing and has no records: leave --from out")
    found = {cell: _of_cell(cell, runs) for cell in recipe.cells}
    missing = next((cell for cell, by_seed in found.items() if not by_seed), None)
    if missing is not None and not recipe.is_grid:
        raise ValueError(
            f"{stored} has no run of {missing!r}, which would be called {slug(missing)}: name a "
            "folder that holds all runs of the recipe at this scale"
        )
    found = {cell: by_seed for cell, by_seed in found.items() if by_seed}
    seeds = _seeds(found)
    recipe = replace(recipe, seeds=seeds, stand_in=f"{recipe.stand_in} {_from(stored)}".strip())
    chosen = {cell: [by_seed[seed] for seed in seeds] for cell, by_seed in found.items()}
    folder = Path(out) if out is not None else Path("reproductions") / f"{name}-{scale}"
    return draw(name, at, recipe, chosen, folder)


def _from(stored: str | Path) -> str:
    return f"Drawn from the records in {Path(stored)}; nothing was trained for this page."


def _runs(stored: Path) -> dict[str, Run]:
    """The runs in a folder, by the names of theirs."""
    folder = stored / "runs" if (stored / "runs").is_dir() else stored
    if not folder.is_dir():
        raise ValueError(f"{stored} is not a folder: name one with the run folders of a recipe")
    places = sorted(place.parent for place in folder.glob("*/experiment.toml"))
    if not places:
        raise ValueError(f"{stored} holds no run: name a folder with the run folders of a recipe")
    return {place.name: _read(place) for place in places}


def _read(place: Path) -> Run:
    if (place / ROUNDS).is_file() or not (place / PACKED).is_file():
        return read(place)
    with tempfile.TemporaryDirectory() as made:
        whole = Path(made) / place.name
        shutil.copytree(place, whole, ignore=shutil.ignore_patterns(PACKED, "*.safetensors"))
        try:
            (whole / ROUNDS).write_bytes(gzip.decompress((place / PACKED).read_bytes()))
        except (OSError, EOFError) as error:
            raise ValueError(f"{place / PACKED} cannot be unpacked: {error}") from None
        return replace(read(whole), folder=place)


def _used(runs: Sequence[Run]) -> Recorded:
    sources = [run.manifest["weights"]["source"] for run in runs if run.manifest.get("weights")]
    datasets = [str(settings(run.experiment)["dataset"]) for run in runs]
    return Recorded(frozenset(datasets), tuple(dict.fromkeys(sources)))


def _of_cell(cell: str, runs: Mapping[str, Run]) -> dict[int, Run]:
    """The runs of a cell, by seed."""
    name = slug(cell)
    own = re.compile(rf"{re.escape(name)}(-seed\d+)?")
    return {run.manifest["seed"]: run for place, run in runs.items() if own.fullmatch(place)}


def _seeds(found: Mapping[str, Mapping[int, Run]]) -> list[int]:
    """Those that every cell was run with: comparisons are seed by seed."""
    if not found:
        raise ValueError("the folder has no run of this recipe: name the folder of its own runs")
    first, *others = found.values()
    common = sorted(set(first).intersection(*others))
    if not common:
        raise ValueError("the cells have no seed in common: name a folder of one reproduction")
    return common
