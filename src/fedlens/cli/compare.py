"""`fedlens compare`."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer

from fedlens.cli.arguments import (
    DataFolder,
    Json,
    Quiet,
    RayAddress,
    name_cluster,
    once_written,
    print_json,
    terminal_columns,
    watching,
)
from fedlens.cli.report import say_passed_over
from fedlens.cli.stopping import Stopped
from fedlens.reading import printable

SEEDS = 5  # of each experiment, by default


def compare_command(
    what: Annotated[
        list[str],
        typer.Argument(
            metavar="[NAME=]WHAT...",
            help="Run folders, or a folder of them; or files to run. A name is the variant's.",
        ),
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
    """Test whether one algorithm is better than another, by seed."""
    from fedlens.report.artists import artists
    from fedlens.report.compare import compare
    from fedlens.report.pairs import check_target, pair_rows
    from fedlens.report.tables import table
    from fedlens.runs import progress

    check_target(target, "--target")  # before any run
    named = _named(what)
    paths = [path for some in named.values() for path in some]
    variants: Mapping[str, Sequence[Path]] | list[Path] = named if "" not in named else paths
    drawn: AbstractContextManager[None] = nullcontext()
    if missing := [path for path in paths if not path.exists()]:
        raise ValueError(
            f"there is no {missing[0]}: name experiment files, or folders that fedlens run wrote"
        )
    if any(path.is_file() for path in paths):
        folders = [path for path in paths if path.is_dir()]
        if folders:
            raise ValueError(
                f"{folders[0]} is a folder: name experiment files or run folders, not both"
            )
        files = {name or path.stem: path for name, some in named.items() for path in some}
        if len(files) < max(len(paths), 2):
            raise ValueError("name two experiment files or more, of different names")
        out = out or Path("runs") / "-or-".join(files)
        runs = _run(files, SEEDS if seeds is None else seeds, out, data, ray_address, quiet)
        variants = runs if by is None else [path for some in runs.values() for path in some]
        drawn = once_written()
    elif ray_address is not None:
        raise ValueError("--ray-address is for experiment files: run folders need no cluster")
    elif seeds is not None:
        raise ValueError(f"--seeds {seeds} is for experiment files: run folders have their own")
    with (
        drawn,
        artists() as drawing,
        watching(quiet, progress.counted, "figures") as watch,
    ):
        found = compare(variants, by, target, out, watch, drawing)
    if found.left_out:
        print(f"fedlens: left out: runs that {printable(found.left_out)}", file=sys.stderr)
    if found.unequal:
        print(f"fedlens: {printable(found.unequal)}", file=sys.stderr)
    if as_json:
        print_json([asdict(pair) for pair in found.pairs])
        return
    if len(found.pairs) > 1:
        print(f"{table(*pair_rows(found.pairs), terminal_columns())}\n")
    print(printable(found.summary))
    print(f"report: {printable(str(found.page))}")


def _named(what: list[str]) -> dict[str, list[Path]]:
    """Run folders or files by name, from words `NAME=PATH`; the name is "" for a plain path."""
    from fedlens.run_files import runs_in

    found: dict[str, list[Path]] = {}
    for word in what:
        name, equals, path = word.partition("=")
        if not equals or "/" in name or Path(word).exists():  # names of sweep folders contain =
            name, path = "", word
        elif not (name and path):
            raise ValueError(f"{word!r} lacks a name or a folder: write NAME=FOLDER")
        found.setdefault(name, []).append(Path(path))
    if "" in found and len(found) > 1:
        for name in filter(None, found):
            if not found[name][0].exists():
                raise ValueError(
                    f"{name}={found[name][0]} is not a file or folder: put settings into the "
                    "experiment files"
                )
        raise ValueError(f"{found[''][0]} has no name: write NAME={found[''][0]}, or name none")
    for paths in found.values():
        say_passed_over(paths)
    return {name: runs_in(paths) for name, paths in found.items()}


def _run(
    files: Mapping[str, Path],
    seeds: int,
    out: Path,
    data: Path | None,
    ray_address: str | None,
    quiet: bool,
) -> dict[str, list[Path]]:
    """Run each experiment with the same seeds, or resume; return the run folders by name."""
    from fedlens.experiment import Experiment
    from fedlens.runs import progress

    if seeds < 1:
        raise ValueError(f"--seeds is {seeds}: choose 1 or more, 5 for a clear answer")
    read = {name: Experiment.read(path) for name, path in files.items()}
    from fedlens.runs.sweep import prepare  # it imports PyTorch, which mistakes need not wait for

    points = {
        f"{name}-{seed}": replace(experiment, seed=seed)
        for name, experiment in read.items()
        for seed in range(seeds)
    }
    name_cluster(ray_address, {point.engine for point in points.values()})
    with watching(quiet, progress.counted, "reading images") as reading:
        sweep = prepare(points, out, data=data, watch=reading)
    if not quiet:
        print(f"{printable(out.name)}: {sweep.describe()}", file=sys.stderr, flush=True)
    try:
        with watching(quiet, progress.rounds, out.name, sweep.total, sweep.done) as watch:
            sweep.run(watch)
    except KeyboardInterrupt as error:
        raise Stopped("run the same command again to go on") from error
    return {name: [out / f"{name}-{seed}" for seed in range(seeds)] for name in files}
