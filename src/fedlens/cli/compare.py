"""`fedlens compare`."""

from __future__ import annotations

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
    once_written,
    one_value_each,
    print_json,
    print_table,
    warn,
)
from fedlens.cli.report import say_passed_over
from fedlens.cli.sweep import prepared, run_shown
from fedlens.config.experiment import Experiment
from fedlens.config.explained import keys
from fedlens.config.options import did_you_mean
from fedlens.storage.reading import printable
from fedlens.storage.run_files import runs_in

SEEDS = 5  # of each experiment, by default


def compare_command(
    what: Annotated[
        list[str],
        typer.Argument(
            metavar="[NAME=]WHAT... [KEY=VALUE]...",
            help="Run folders, or a folder of them; or files to run, and settings for all of them. "
            "A name is the variant's.",
        ),
    ],
    by: Annotated[
        str | None, typer.Option(help="The settings that tell variants apart. [default: algorithm]")
    ] = None,
    target: Annotated[
        float | None,
        typer.Option(help="The accuracy that costs are measured to. [default: 90% of the best]"),
    ] = None,
    last: Annotated[
        int | None,
        typer.Option(
            help="The last evaluations, whose mean is compared. [default: a fifth, up to 10]"
        ),
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
    from fedlens.report.compare import compare
    from fedlens.report.drawing import drawing
    from fedlens.report.pairs import check_target, pair_rows

    check_target(target, "--target")  # before any run
    overrides = [word for word in what if _is_override(word)]
    named = _named([word for word in what if word not in overrides])
    paths = [path for some in named.values() for path in some]
    variants: Mapping[str, Sequence[Path]] | list[Path] = named if "" not in named else paths
    written: AbstractContextManager[None] = nullcontext()
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
        with one_value_each(overrides, "fedlens sweep FILE --grid"):
            read = {name: Experiment.read(path, overrides) for name, path in files.items()}
        runs = _run(read, SEEDS if seeds is None else seeds, out, data, ray_address, quiet)
        variants = runs if by is None else [path for some in runs.values() for path in some]
        written = once_written()
    elif ray_address is not None:
        raise ValueError("--ray-address is for experiment files: run folders need no cluster")
    elif overrides:
        raise ValueError(f"{overrides[0]} is for experiment files: run folders have their own")
    elif seeds is not None:
        raise ValueError(f"--seeds {seeds} is for experiment files: run folders have their own")
    with written, drawing(not quiet) as draw:
        found = compare(variants, by, target, last, out, draw)
    if found.left_out:
        warn(f"left out: runs that {found.left_out}")
    if found.unequal:
        warn(found.unequal)
    if as_json:
        print_json([asdict(pair) for pair in found.pairs])
        return
    if len(found.pairs) > 1:
        print_table(*pair_rows(found.pairs))
        print()
    print(printable(found.summary))
    print(f"report: {printable(str(found.page))}")


def _is_override(word: str) -> bool:
    """Whether a word sets a key of the experiments, and names no file or folder."""
    key, equals, value = word.partition("=")
    if not equals or key.partition(".")[0] not in _sections():
        return False
    if Path(word).exists() or Path(value).exists():
        return False
    if key == "seed":
        raise ValueError(f"{word}: every file is run with the same seeds: choose --seeds N")
    return True


def _sections() -> set[str]:
    return {known.partition(".")[0] for known in keys()}


def _named(what: list[str]) -> dict[str, list[Path]]:
    """Run folders or files by name, from words `NAME=PATH`; the name is "" for a plain path."""
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
                hint = did_you_mean(name, _sections())
                raise ValueError(
                    f"{name}={found[name][0]} is neither a file or folder nor a setting: {hint}"
                )
        raise ValueError(f"{found[''][0]} has no name: write NAME={found[''][0]}, or name none")
    for paths in found.values():
        say_passed_over(paths)
    return {name: runs_in(paths) for name, paths in found.items()}


def _run(
    experiments: Mapping[str, Experiment],
    seeds: int,
    out: Path,
    data: Path | None,
    ray_address: str | None,
    quiet: bool,
) -> dict[str, list[Path]]:
    """Run each experiment with the same seeds, or resume; return the run folders by name."""
    if seeds < 1:
        raise ValueError(f"--seeds is {seeds}: choose 1 or more, 5 for a clear answer")
    points = {
        f"{name}-{seed}": replace(experiment, seed=seed)
        for name, experiment in experiments.items()
        for seed in range(seeds)
    }
    run_shown(prepared(points, out, data, ray_address, quiet), out, quiet)
    return {name: [out / f"{name}-{seed}" for seed in range(seeds)] for name in experiments}
