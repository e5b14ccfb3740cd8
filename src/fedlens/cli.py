"""The command line: verbs."""

from __future__ import annotations

import json
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import click
import typer

import fedlens
from fedlens.arguments import (
    DataFolder,
    ExperimentFile,
    Json,
    Overrides,
    Quiet,
    Seed,
    Track,
    watching,
)
from fedlens.compare_command import compare_command
from fedlens.data.commands import data_app
from fedlens.options import importable
from fedlens.recipes.command import reproduce_command
from fedlens.report.commands import report_command, watch_command
from fedlens.sweep_command import sweep_command

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.add_typer(data_app, name="data")
app.command("reproduce")(reproduce_command)
app.command("sweep")(sweep_command)

EXIT = {"finished": 0, "diverged": 3}


def _version(asked: bool) -> None:
    if asked:
        print(f"fedlens {fedlens.__version__}")
        raise typer.Exit


@app.callback()
def fedlens_command(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Federated learning for vision. Every command takes --help, and --debug for tracebacks."""


@app.command("run")
def run_command(
    experiment: ExperimentFile,
    overrides: Overrides = None,
    seed: Seed = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda ...")] = None,
    out: Annotated[Path | None, typer.Option(help="The run folder. [default: runs/NAME]")] = None,
    overwrite: Annotated[bool, typer.Option(help="Replace a run that is there.")] = False,
    data: DataFolder = None,
    track: Track = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Run one experiment."""
    from fedlens import progress
    from fedlens.experiment import Experiment
    from fedlens.track import tracking

    given = list(overrides or [])
    if seed is not None:
        given.append(f"seed={seed}")
    if device is not None:
        given.append(f"device={json.dumps(device)}")
    described = Experiment.read(experiment, given)
    folder = out or _free(Path("runs") / experiment.stem)
    if folder.exists() and not overwrite:
        raise ValueError(f"{folder} exists: choose another --out, or add --overwrite")
    with (
        _telling(folder),
        tracking(track or (), folder, described.plain()) as send,
        watching(quiet, progress.rounds, folder.name, described.rounds) as watch,
    ):
        both = progress.all_of(watch, send)
        result = fedlens.run(described, folder, overwrite=overwrite, data=data, watch=both)
    _finish(result, as_json)


@app.command("resume")
def resume_command(
    run: Annotated[Path, typer.Argument(help="The folder of a run that stopped.")],
    data: DataFolder = None,
    track: Track = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Go on where a run stopped, to the same result."""
    from fedlens import progress
    from fedlens.folder import RunFolder
    from fedlens.tables import read_tables
    from fedlens.track import tracking

    tables = read_tables(run / "experiment.toml")
    total = tables.get("rounds", 0)
    done = RunFolder(run).last_saved or 0
    with (
        _telling(run),
        tracking(track or (), run, tables) as send,
        watching(quiet, progress.rounds, run.name, total, done) as watch,
    ):
        result = fedlens.resume(run, data=data, watch=progress.all_of(watch, send))
    _finish(result, as_json)


@app.command("partition")
def partition_command(
    experiment: ExperimentFile,
    overrides: Overrides = None,
    seed: Annotated[int | None, typer.Option(help="Which draw of the split.")] = None,
    out: Annotated[Path | None, typer.Option(help="The picture. [default: NAME-split.png]")] = None,
    data: DataFolder = None,
    as_json: Json = False,
) -> None:
    """Show who holds what, before any training."""
    from fedlens.build import partition
    from fedlens.data import statistics
    from fedlens.experiment import Experiment

    if out is not None and out.suffix != ".png":
        raise ValueError(f"--out {out}: the picture is a PNG file, let its name end in .png")
    chosen = [] if seed is None else [f"clients.seed={seed}"]
    described = Experiment.read(experiment, [*(overrides or []), *chosen])
    dataset, train, holdings = partition(described, data)
    if as_json:
        print(json.dumps(statistics.summary(holdings, train.labels, dataset.num_classes)))
    else:
        for line in statistics.describe(holdings, train.labels, dataset.num_classes):
            print(line)
    if out is not None or not as_json:
        from fedlens.report.partition import draw, title_of

        counts = holdings.label_counts(train.labels, dataset.num_classes).numpy()
        named = described.clients.partition
        title = title_of(dataset.name, named)
        path = out or Path(f"{experiment.stem}-split.png")
        draw(counts, dataset.classes, title, path, holdings.names)
        said_to = sys.stderr if as_json else sys.stdout
        print(f"picture: {path}", file=said_to)
        places = [named.options.get(key, key) for key in ("lat", "lon")]
        cells = named.name == "s2" or named.options.get("column") == "cell"
        if cells and all(name in train.columns for name in places):
            from fedlens.report import map

            lat, lon = (train.columns[name].astype(float) for name in places)
            path = path.with_name(f"{path.stem}-map{path.suffix}")
            print(f"map: {map.draw(lat, lon, holdings, title, path)}", file=said_to)


app.command("report")(report_command)
app.command("compare")(compare_command)
app.command("watch")(watch_command)


@app.command("list")
def list_command(
    kind: Annotated[
        Literal["algorithms", "models", "partitions", "datasets", "recipes"] | None,
        typer.Argument(help="algorithms, models, partitions, datasets or recipes"),
    ] = None,
) -> None:
    """Print the names there are to choose from, one a line; or what can be listed."""
    from fedlens.algorithms import ALGORITHMS
    from fedlens.data import DATASETS
    from fedlens.data.partitions import PARTITIONS
    from fedlens.models import MODELS
    from fedlens.recipes import RECIPES

    tables: dict[str, dict[str, Any]] = {
        "algorithms": ALGORITHMS,
        "models": MODELS,
        "partitions": PARTITIONS,
        "datasets": DATASETS,
        "recipes": RECIPES,
    }
    for name in tables if kind is None else tables[kind]:
        print(name)


@app.command("bench")
def bench_command(
    workloads: Annotated[
        list[str] | None, typer.Argument(help="pfl-cnn, hsu-cnn, mcmahan-cnn (these if none) ...")
    ] = None,
    engine: Annotated[str, typer.Option(help="auto, sequential, stacked or processes")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda ...")] = "auto",
    precision: Annotated[str, typer.Option(help="auto, fp32, tf32, bf16 or fp64")] = "auto",
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Measure how fast rounds are on this machine."""
    from fedlens.bench import COMMON, bench, named, table

    names = workloads or COMMON
    for name in names:
        named(name)  # a wrong one is found before any is measured

    def say(stage: str) -> None:
        if not quiet:
            print(stage, file=sys.stderr, flush=True)

    found = [
        bench(name, engine=engine, device=device, precision=precision, watch=say) for name in names
    ]
    if as_json:
        print(json.dumps(found[0] if len(found) == 1 else found))
        return
    first = found[0]
    print(f"engine {first['engine']}, {first['device']}, {first['precision']}, ", end="")
    print(f"median of {first['repeats']}; the limit is {first['limit_flops'] / 1e9:,.0f} GFLOP/s")
    print(table(found))


@app.command("doctor")
def doctor_command(data: DataFolder = None, as_json: Json = False) -> None:
    """Say what this machine has, and what is missing."""
    from fedlens.doctor import findings

    found = findings(data)
    if as_json:
        print(json.dumps(found))
        return
    for name, value in found.items():
        shown = value if isinstance(value, dict) else {"": value}
        for key, part in shown.items():
            print(
                f"{' '.join(filter(None, (name, key))):<28} {'missing' if part is None else part}"
            )


def _finish(result: fedlens.Result, as_json: bool) -> None:
    from fedlens.report import read_all, report, rows, table

    assert result.folder is not None
    report([result.folder])
    if as_json:
        print((result.folder / "summary.json").read_text(), end="")
    else:
        print(table(*rows(read_all([result.folder]))))
        print(f"run:    {result.folder}")
        print(f"report: {result.folder / 'report.html'}")
    if result.summary["collapsed"]:
        print(
            f"fedlens: after {len(result.records)} rounds the model gives every image the same "
            "class: train longer or, if it did better before, with a smaller local.lr",
            file=sys.stderr,
        )
    if result.status == "diverged":
        last = result.records[-1]["round"]
        print(f"fedlens: the run diverged in round {last}: try a smaller local.lr", file=sys.stderr)
    raise SystemExit(EXIT[result.status])


def _free(wanted: Path) -> Path:
    """`wanted`, or the first of wanted-2, wanted-3, ... that does not exist."""
    free, number = wanted, 1
    while free.exists():
        number += 1
        free = wanted.with_name(f"{wanted.name}-{number}")
    return free


@contextmanager
def _telling(folder: Path) -> Iterator[None]:
    """Say how to go on, should the run be interrupted."""
    try:
        yield
    except KeyboardInterrupt:
        if (folder / "checkpoint").exists():
            print(f"\nfedlens: stopped; go on with: fedlens resume {folder}", file=sys.stderr)
        raise


def main() -> None:
    """One clear line for a mistake, never a traceback (--debug shows it)."""
    debug = "--debug" in sys.argv
    arguments = [word for word in sys.argv[1:] if word != "--debug"]
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        with importable(Path.cwd()):
            # Typer gives back the status of an exit, and 130 after Ctrl-C.
            status = app(arguments, standalone_mode=False, prog_name="fedlens") or 0
    except (KeyboardInterrupt, click.exceptions.Abort):
        status = 130
    except click.ClickException as error:
        status = _complain(error.format_message(), 2, debug)
    except ValueError as error:
        status = _complain(str(error), 2, debug)
    except ConnectionError as error:
        status = _complain(str(error), 1, debug)
    except Exception as error:
        status = _complain(f"failed: {type(error).__name__}: {error}", 1, debug)
    raise SystemExit(status)


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def _complain(message: str, status: int, debug: bool) -> int:
    if debug:
        traceback.print_exc()
    if message:  # the help that a command without arguments shows comes without one
        print(f"fedlens: {message}", file=sys.stderr)
    return status


if __name__ == "__main__":
    main()
