"""`fedlens compare`."""

from __future__ import annotations

import json
import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer

from fedlens.cli.arguments import DataFolder, Json, Quiet, RayAddress, name_cluster, once_written
from fedlens.reading import printable

SEEDS = 5  # of each experiment, where nobody says how many


def compare_command(
    what: Annotated[
        list[Path], typer.Argument(help="Run folders, or a folder of them; or files to run.")
    ],
    by: Annotated[
        str | None,
        typer.Option(help="The settings that tell variants apart. [default: algorithm]"),
    ] = None,
    target: Annotated[
        float | None,
        typer.Option(help="The accuracy that costs are measured to. [default: 90% of the best]"),
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(help=f"Runs of each experiment file. [default: {SEEDS}]")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Where the page goes, and the runs of experiment files.")
    ] = None,
    data: DataFolder = None,
    ray_address: RayAddress = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Say whether one algorithm is better than another, seed by seed."""
    from fedlens.report.compare import compare
    from fedlens.run_files import runs_in
    from fedlens.runs import progress

    what = runs = runs_in(what)
    drawn: AbstractContextManager[None] = nullcontext()
    if any(path.is_file() for path in what):
        out = out or Path("runs") / "-or-".join(path.stem for path in what)
        runs = _run(what, SEEDS if seeds is None else seeds, out, data, ray_address, quiet)
        drawn = once_written()
    elif ray_address is not None:
        raise ValueError("--ray-address is for experiment files: the runs named are there")
    elif seeds is not None:
        raise ValueError(f"--seeds {seeds} is for experiment files: the runs named have theirs")
    with drawn, progress.figures() as drawing:
        found = compare(runs, by, target, out, drawing)
    if as_json:
        print(json.dumps([asdict(pair) for pair in found.pairs]))
        return
    for verdict in found.verdicts:
        print(printable(verdict))
    print(f"report: {found.page}")


def _run(
    files: list[Path],
    seeds: int,
    out: Path,
    data: Path | None,
    ray_address: str | None,
    quiet: bool,
) -> list[Path]:
    """Run each experiment with the same seeds, or what is left of that; the run folders."""
    from fedlens.experiment import Experiment
    from fedlens.runs import progress
    from fedlens.runs.sweep import prepare

    names = [path.stem for path in files]
    folders = [path for path in files if path.is_dir()]
    if folders:
        raise ValueError(
            f"{folders[0]} is a folder: name experiment files or run folders, not both"
        )
    if len(set(names)) < max(len(names), 2):
        raise ValueError("name two experiment files or more, of different names")
    if seeds < 1:
        raise ValueError(f"--seeds is {seeds}: choose 1 or more, 5 to be able to tell")
    points = {
        f"{path.stem}-{seed}": replace(experiment, seed=seed)
        for path, experiment in zip(files, map(Experiment.read, files), strict=True)
        for seed in range(seeds)
    }
    name_cluster(ray_address, {point.engine for point in points.values()})
    sweep = prepare(points, out, data=data)
    if not quiet:
        print(f"{out.name}: {sweep.describe()}", file=sys.stderr, flush=True)
    try:
        watching = progress.rounds(out.name, sweep.total, sweep.done)
        with nullcontext() if quiet else watching as watch:
            sweep.run(watch)
    except KeyboardInterrupt:
        print("\nfedlens: stopped; the same command goes on from here", file=sys.stderr)
        raise
    return [out / name for name in points]
