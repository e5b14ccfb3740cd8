"""Pages drawn from the stored records of an earlier reproduction."""

from __future__ import annotations

import contextlib
import gzip
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from fedlens.recipes import RECIPES, ScaleName, check_known
from fedlens.recipes.recipe import Recipe, Recorded, Results, Scale
from fedlens.recipes.reproduce import Reproduced, draw, slug
from fedlens.report.artists import Artists
from fedlens.run_files import EXPERIMENT, ROUNDS, read_experiment, read_manifest
from fedlens.runs.records import Run, read, settings

MADE_WITH = ("dataset", "model", "rounds")
PACKED = f"{ROUNDS}.gz"


def redraw(
    name: str,
    scale: ScaleName,
    stored: str | Path,
    out: str | Path | None = None,
    *,
    data: Path | None = None,
    watch: Callable[..., None] | None = None,
    artists: Artists | None = None,
) -> Reproduced:
    """Draw the page of a table or figure from records; nothing is trained.

    `stored` contains run folders, like `runs` of a reproduction, or is the folder of a
    reproduction. Records may be compressed, as rounds.jsonl.gz. The page shows the cells and seeds
    that were run; it needs data sets only if it shows their images or labels. `watch` is called
    with how many runs are read of how many, and "reading records", and then with how many figures
    are drawn of how many.
    """
    recipe, results = restore(name, scale, stored, data, watch)
    folder = Path(out) if out is not None else Path("reproductions") / f"{name}-{scale}"
    return draw(name, results.scale, recipe, results.runs, folder, watch, artists)


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
    runs = _runs(Path(stored), watch)
    used = _used((run.experiment, run.manifest) for run in runs.values())
    at = Scale(scale, data, used)
    recipe = RECIPES[name](at)
    found = {cell: of_cell for cell in recipe.cells if (of_cell := _of_cell(cell, runs))}
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
    seeds = sorted({run.manifest["seed"] for of_cell in found.values() for run in of_cell})
    recipe = replace(recipe, seeds=seeds, stand_in=f"{recipe.stand_in} {_from(stored)}".strip())
    return recipe, Results(at, found)


def _scale_of(name: str, at: Scale, runs: Mapping[str, Run]) -> ScaleName | None:
    """The scale that fits most of the runs, if one fits any."""
    fitting: dict[ScaleName, int] = {}
    for scale in get_args(ScaleName):
        with contextlib.suppress(ValueError):  # that scale lacks its data
            fitting[scale] = _fitting(RECIPES[name](replace(at, name=scale)), runs)
    best = max(fitting, key=fitting.__getitem__, default=None)
    return best if best is not None and fitting[best] else None


def _fitting(recipe: Recipe, runs: Mapping[str, Run], keys: Sequence[str] = MADE_WITH) -> int:
    """How many runs have the same values of `keys` as their cells."""
    return sum(
        all(settings(run.experiment).get(key) == planned.get(key) for key in keys)
        for cell, experiment in recipe.cells.items()
        for planned in [settings(experiment.plain())]
        for run in _of_cell(cell, runs)
    )


def _from(stored: str | Path) -> str:
    return f"Drawn from the records in {Path(stored)}; nothing was trained for this page."


def coverage(name: str, stored: Path) -> tuple[int, int]:
    """How many experiments of a recipe have stored runs at `paper` scale, and how many it has.

    `recipes.part` reads the same from results/README.md; tests compare the two.
    """
    places = _places(stored)
    names = [place.name for place in places]
    used = _used([(read_experiment(place), read_manifest(place)) for place in places])
    cells = RECIPES[name](Scale("paper", recorded=used)).cells
    found = [cell for cell in cells if any(map(_folder_of(cell).fullmatch, names))]
    return len(found), len(cells)


def _runs(stored: Path, watch: Callable[..., None] | None) -> dict[str, Run]:
    """The runs in a folder, by the names of their folders."""
    places, found = _places(stored), {}
    for place in places:
        found[place.name] = _read(place)
        if watch is not None:
            watch(len(found), len(places), "reading records")
    return found


def _places(stored: Path) -> list[Path]:
    folder = stored / "runs" if (stored / "runs").is_dir() else stored
    if not folder.is_dir():
        raise ValueError(f"{stored} is not a folder: name one with the run folders of a recipe")
    places = sorted(place.parent for place in folder.glob(f"*/{EXPERIMENT}"))
    if not places:
        raise ValueError(f"{stored} holds no run: name a folder with the run folders of a recipe")
    return places


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


def _used(runs: Iterable[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> Recorded:
    """The data sets and weights of runs, from their experiments and manifests."""
    datasets, sources = set(), dict[str, None]()
    for experiment, manifest in runs:
        datasets.add(str(settings(experiment)["dataset"]))
        if manifest.get("weights"):
            sources[manifest["weights"]["source"]] = None
    return Recorded(frozenset(datasets), tuple(sources))


def _of_cell(cell: str, runs: Mapping[str, Run]) -> list[Run]:
    """The runs of a cell, ordered by seed."""
    own = _folder_of(cell)
    found = [run for place, run in runs.items() if own.fullmatch(place)]
    by_seed: dict[int, Run] = {}
    for run in found:
        other = by_seed.setdefault(run.manifest["seed"], run)
        if other is not run:
            raise ValueError(
                f"{other.folder} and {run.folder} have one seed: take one of them away, since a "
                "mean over seeds counts each once"
            )
    return [by_seed[seed] for seed in sorted(by_seed)]


def _folder_of(cell: str) -> re.Pattern[str]:
    """A pattern for the names of a cell's run folders."""
    return re.compile(rf"{re.escape(slug(cell))}(-seed\d+)?")
