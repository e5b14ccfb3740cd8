"""`fedlens sweep`."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedlens.cli import completion
from fedlens.cli.arguments import (
    DataFolder,
    ExperimentFile,
    Json,
    Quiet,
    RayAddress,
    name_cluster,
    once_written,
    one_value_each,
    print_json,
    print_table,
    warn,
)
from fedlens.cli.run import EXIT
from fedlens.cli.stopping import Stopped
from fedlens.config.experiment import Experiment
from fedlens.runs.progress import counted, in_rounds, shown
from fedlens.storage.reading import printable
from fedlens.storage.run_files import UNSOUND

if TYPE_CHECKING:
    from fedlens.report.drawing import Draw
    from fedlens.runs.result import Result
    from fedlens.runs.sweep import Sweep


def sweep_command(
    experiment: ExperimentFile,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            help="key=value for every point: rounds=50 ...", autocompletion=completion.overrides
        ),
    ] = None,
    axes: Annotated[
        list[str] | None,
        typer.Option(
            "--grid",
            help="key=value,value: local.lr=0.01,0.1. May be repeated.",
            autocompletion=completion.overrides,
        ),
    ] = None,
    seeds: Annotated[int | None, typer.Option(help="Repeat each with this many seeds.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="The folder of the run folders. [default: runs/NAME-sweep]")
    ] = None,
    overwrite: Annotated[bool, typer.Option(help="Replace runs that are there.")] = False,
    data: DataFolder = None,
    ray_address: RayAddress = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Run every combination of values. The same command continues a sweep that stopped."""
    from fedlens.report.drawing import drawing
    from fedlens.runs.grid import combinations, naming, parse_axes

    given = list(overrides or [])
    values = parse_axes(axes or [], given)
    with one_value_each(given, "--grid"):
        first_seed = _seed(experiment, given, values)
    points = {}
    for name, own in combinations(values, seeds, first_seed).items():
        with naming(name):
            points[name] = Experiment.read(experiment, given + own)
    folder = out or Path("runs") / f"{experiment.stem}-sweep"
    sweep = prepared(points, folder, data, ray_address, quiet, overwrite)
    with drawing(not quiet) as draw:
        results = run_shown(sweep, folder, quiet)
        _finish(results, folder, as_json, draw)


def prepared(
    points: Mapping[str, Experiment],
    folder: Path,
    data: Path | None,
    ray_address: str | None,
    quiet: bool,
    overwrite: bool = False,
) -> Sweep:
    """The sweep of these points, checked; what it will do is said."""
    from fedlens.runs.sweep import prepare  # it imports PyTorch, which mistakes need not wait for

    name_cluster(ray_address, {point.engine for point in points.values()})
    with shown(not quiet, counted, "reading images") as reading:
        sweep = prepare(points, folder, overwrite=overwrite, data=data, watch=reading)
    if not quiet:
        print(f"{printable(folder.name)}: {sweep.describe()}", file=sys.stderr, flush=True)
    return sweep


def run_shown(sweep: Sweep, folder: Path, quiet: bool) -> dict[str, Result]:
    """Run a sweep with its progress; if it is interrupted, say how to go on."""
    try:
        with shown(not quiet, in_rounds, folder.name, sweep.total, sweep.done) as watch:
            return sweep.run(watch)
    except KeyboardInterrupt as error:
        raise Stopped("run the same command again to go on") from error


def _seed(file: Path, overrides: list[str], axes: Mapping[str, Sequence[Any]]) -> int:
    """The seed of an experiment, which may need what a grid sets in order to be valid."""
    from fedlens.runs.grid import combinations

    try:
        return Experiment.read(file, overrides).seed
    except ValueError as error:
        if not axes:
            raise
        firsts = {key: values[:1] for key, values in axes.items()}
        ((name, own),) = combinations(firsts, None, 0).items()
        try:
            return Experiment.read(file, overrides + own).seed
        except ValueError as other:
            if str(other) == str(error):  # the grid has no part in it
                raise
            raise ValueError(f"{other} (point {name})") from other


def _finish(results: dict[str, Result], folder: Path, as_json: bool, draw: Draw) -> None:
    from fedlens.report import read_all, report, rows
    from fedlens.report.groups import means

    runs = [folder / name for name in results]
    with once_written():
        if as_json:
            print_json({name: result.summary for name, result in results.items()})
        else:
            found = read_all(runs)
            print_table(*rows(found))
            if (over_seeds := means(found)) is not None:
                header, body, best = over_seeds
                if len(body) < len(runs):
                    print()
                    print_table(header, body)
                    print()
                for words in best:
                    print(f"best:   {printable(words)}")
            print(f"runs:   {printable(str(folder))}", flush=True)
        page = report(runs, folder, draw)
        if not as_json:
            print(f"report: {printable(str(page))}")
    by_end: dict[str, list[str]] = {}
    for name, result in results.items():
        collapsed = result.status == "finished" and result.summary.get("collapsed") is True
        by_end.setdefault("collapsed" if collapsed else result.status, []).append(name)
    said = {
        "diverged": "{} diverged",
        "invalid": f"{{}} ended with a loss that is {UNSOUND}",
        "collapsed": "in {} the model gives every image the same class",
    }
    for end in [one for one in said if one in by_end]:
        count = f"{len(by_end[end])} of {len(results)} points"
        warn(f"{said[end].format(count)}: {' '.join(by_end[end])}")
    statuses = {result.status for result in results.values()}
    raise SystemExit(0 if "finished" in statuses else EXIT[min(statuses, key=EXIT.__getitem__)])
