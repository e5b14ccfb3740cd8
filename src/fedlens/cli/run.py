"""`fedlens run`, `resume`, `sweep` and `compare`: what trains."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from fedlens.cli import arguments, completion
from fedlens.cli.arguments import (
    notify,
    once_written,
    one_value_each,
    paragraph,
    print_table,
    say,
    warn,
)
from fedlens.cli.report import say_passed_over
from fedlens.cli.stopping import going_on_by
from fedlens.config.experiment import Experiment
from fedlens.config.explained import keys
from fedlens.config.names import EngineName
from fedlens.config.options import check, did_you_mean
from fedlens.runs.progress import counted, decoding, in_rounds, shown
from fedlens.storage import run_files
from fedlens.storage.reading import argument, reason
from fedlens.storage.run_files import can_go_on
from fedlens.storage.words import count_of

if TYPE_CHECKING:
    from fedlens.runs.result import Result
    from fedlens.setup import Setup

EXIT = {"finished": 0, "invalid": 1, "diverged": 3, "stopped": 4}
SEEDS = 5  # of each experiment to compare, by default


def run_command(
    experiment: arguments.ExperimentFile,
    overrides: arguments.Overrides = None,
    rounds: Annotated[int | None, Option(help="Rounds, in place of the experiment's.")] = None,
    seed: arguments.Seed = None,
    device: Annotated[str | None, Option(help="auto, cpu, cuda ...")] = None,
    out: Annotated[Path | None, Option(help="The run folder. [default: runs/NAME]")] = None,
    overwrite: Annotated[bool, Option(help="Replace a run that is there.")] = False,
    data: arguments.DataFolder = None,
    ray_address: arguments.RayAddress = None,
    track: arguments.Track = None,
    quiet: arguments.Quiet = False,
    as_json: arguments.Json = False,
) -> None:
    """Run one experiment."""
    chosen = {"rounds": rounds, "seed": seed, "device": device}
    given = list(overrides or [])
    given += [f"{key}={json.dumps(value)}" for key, value in chosen.items() if value is not None]
    with one_value_each(given, f"fedlens sweep {argument(experiment)} --grid"):
        described = Experiment.read(experiment, given)
    arguments.name_cluster(ray_address, [described.engine])
    wanted = Path("runs") / experiment.stem
    place = _placed(out or wanted, overwrite) if out or overwrite else _reserved(wanted)
    from fedlens.runs.loop import run_to_end
    from fedlens.runs.progress import all_of
    from fedlens.runs.run import say_beforehand, start
    from fedlens.runs.track import tracking
    from fedlens.setup import build

    with (
        place as folder,
        _resume_hint(folder, replaced=run_files.identity(folder)),
        tracking(track or (), folder, described.plain()) as send,
        shown(not quiet, in_rounds, folder.name, described.rounds) as watch,
    ):
        setup = build(described, data, watch=decoding(watch))
        say_beforehand([setup])
        if not quiet:
            notify(_found(setup))
        both = all_of(watch, send)
        (result,) = run_to_end([start(described, setup, folder, overwrite=overwrite, watch=both)])
    finish_run(folder, result.status, as_json, quiet)


def _found(setup: Setup) -> str:
    """A line about what a data set holds: its classes, its images, its clients."""
    from fedlens.data.statistics import FEW

    def some(names: Sequence[str]) -> str:
        return f" ({', '.join(names)})" if 0 < len(names) <= FEW else ""

    dataset, tests = setup.dataset, setup.client_tests
    validation = len(setup.parts.get("validation", ()))
    taken = validation if dataset.validation is None else 0
    training = f"{len(dataset.train) - taken:,} training"
    if tests and tests.part == "train" and len(tests.holdings.index):
        training += f" ({len(tests.holdings.index):,} of them held out by clients)"
    images = [training, *([f"{validation:,} validation"] if validation else [])]
    count, names = setup.federation.num_clients, setup.federation.described().names
    return (
        f"{dataset.name}: {dataset.num_classes} classes{some(dataset.classes)}, "
        f"{', '.join(images)} and {len(dataset.test):,} test images of "
        f"{'×'.join(map(str, dataset.shape))}, {count_of(count, 'client')}"
        f"{some(names or ())}"
    )


def resume_command(
    folder: Annotated[Path, Argument(metavar="RUN", help="The folder of a run that stopped.")],
    rounds: Annotated[
        int | None, Option(help="Rounds in all: more, or fewer, than it was started with.")
    ] = None,
    data: arguments.DataFolder = None,
    engine: Annotated[
        str | None, Option(help="ray or processes, for a run that began on the other.")
    ] = None,
    ray_address: arguments.RayAddress = None,
    track: arguments.Track = None,
    quiet: arguments.Quiet = False,
    as_json: arguments.Json = False,
) -> None:
    """Continue a run that stopped, to the same result."""
    run_files.check_run(folder, [run_files.EXPERIMENT])
    tables = run_files.read_experiment(folder)
    chosen: EngineName | None = None if engine is None else check(engine, EngineName, "engine")
    from fedlens.runs.run import resume
    from fedlens.runs.track import tracking

    arguments.name_cluster(ray_address, [chosen or tables.get("engine", "auto")])
    total = check(tables.get("rounds", 0), int, "rounds") if rounds is None else rounds
    done = run_files.last_saved(folder) or 0
    is_over = run_files.read_status(folder) == "finished" and total <= done
    with _resume_hint(folder), tracking(track or (), folder, tables) as send:
        result = resume(
            folder, rounds=rounds, data=data, watch=send, engine=chosen, progress=not quiet
        )
    if is_over:
        warn(f"{folder} is finished, so nothing was run: add --rounds, more than {done}, to go on")
    finish_run(folder, result.status, as_json, quiet)


def finish_run(folder: Path, status: str, as_json: bool, quiet: bool) -> None:
    """Print the results of a run that is over, write its page, and exit with its status."""
    from fedlens.report import read_all, report, rows
    from fedlens.report.cautions import cautions
    from fedlens.report.holdings import client_header, client_names, client_rows, worth
    from fedlens.report.personal import HEADER, personal_rows
    from fedlens.report.privacy import privacy_line
    from fedlens.runs.loop import unsound_losses
    from fedlens.runs.records import settings

    with once_written():
        (run,) = read_all([folder])
        told = [paragraph(one.text) for one in cautions(run)]
        if as_json:
            print((folder / run_files.SUMMARY).read_text(encoding="utf-8"), end="", flush=True)
            print(*told, sep="\n", end="\n" if told else "", file=sys.stderr)
        else:
            print_table(*rows([run]))
            clients = client_rows(run) if client_names(run) else []
            for header, body in ((client_header(run), clients), (HEADER, personal_rows(run))):
                if body:
                    print()
                    print_table(header, body)
                    print()
            private = privacy_line(run)
            for line in (*([f"{private}."] if private else ()), *worth(run)):
                print(paragraph(line))
            print(*told, sep="\n", end="\n" if told else "")
            if status == "finished" and run.summary.get("reason"):
                say(f"ended:  {run.summary['reason']}")
            say(f"run:    {folder}")
        page = report([folder], progress=not quiet)
        if not as_json:
            say(f"report: {page}")
    listed = run.manifest.get("left_out")
    left_out = len(listed) if isinstance(listed, list) else 0
    if left_out:
        images, were = count_of(left_out, "image"), "was" if left_out == 1 else "were"
        warn(f"{images} {were} left out, listed in {folder / run_files.MANIFEST}")
    smaller, count = f"a smaller {_step_size(settings(run.experiment))}", len(run.rounds)
    if wrong := unsound_losses(run.rounds) if status == "invalid" else []:
        warn(
            f"the run is over, but its final {' and '.join(wrong)} is {run_files.UNSOUND}: "
            f"look at the test images and at the model, or try {smaller}"
        )
    elif run.summary.get("collapsed") and status != "diverged":
        warn(
            f"after {count_of(count, 'round')} the model gives every image the same "
            f"class: train longer or, if it did better before, with {smaller}"
        )
    if status == "diverged":
        warn(f"the run diverged in round {count}: try {smaller}")
    if status == "stopped":
        warn(f"the run stopped: {run.summary['reason']}")
    raise SystemExit(EXIT[status])


def _step_size(chosen: Mapping[str, Any]) -> str:
    """The key of the setting that determines the size of a run's local steps."""
    for name in ("liadmm", "celiadmm"):
        own = f"algorithm.{name}"
        if f"{own}.gamma" in chosen and chosen.get(f"{own}.local") != "training":
            return f"{own}.gamma"
    return "local.lr"


@contextmanager
def _placed(folder: Path, overwrite: bool) -> Iterator[Path]:
    """A folder that was asked for, if a run may be written there."""
    from fedlens.runs.folder import check_free

    check_free(folder, overwrite, "choose another --out, or add --overwrite")
    yield folder


@contextmanager
def _reserved(wanted: Path) -> Iterator[Path]:
    """The first of wanted, wanted-2, wanted-3, ... that is new: no other run takes it meanwhile.

    It is an empty folder until the run begins, and is removed if it does not.
    """
    try:
        wanted.parent.mkdir(exist_ok=True)
        for number in itertools.count(1):
            folder = wanted if number == 1 else wanted.with_name(f"{wanted.name}-{number}")
            with suppress(FileExistsError):
                folder.mkdir()
                break
    except OSError as error:
        raise ValueError(
            f"{wanted} cannot be written ({reason(error)}): choose an --out"
        ) from error
    try:
        yield folder
    finally:
        for made in (folder, folder.parent):
            with suppress(OSError):  # it is not empty
                made.rmdir()


@contextmanager
def _resume_hint(folder: Path, replaced: tuple[int, int] | None = None) -> Iterator[None]:
    """Add how to resume the run to the error if it is interrupted or the disk is full.

    `replaced` is the identity of the earlier run folder that this run replaces.
    """
    how, can = (
        f"go on with: fedlens resume {argument(folder)}",
        partial(can_go_on, folder, replaced),
    )
    try:
        with going_on_by(how, can):
            yield
    except OSError as error:
        is_denied = isinstance(error, run_files.Unwritable)
        if not (is_denied or error.errno in arguments.FULL) or not can():
            raise
        full = f"{folder} cannot be written ({reason(error)}): free some space, and"
        raise OSError(f"{error}: {how}" if is_denied else f"{full} {how}") from error


def sweep_command(
    experiment: arguments.ExperimentFile,
    overrides: Annotated[
        list[str] | None,
        Argument(
            help="key=value for every point: rounds=50 ...", autocompletion=completion.overrides
        ),
    ] = None,
    axes: Annotated[
        list[str] | None,
        Option(
            "--grid",
            help="key=value,value: local.lr=0.01,0.1. May be repeated.",
            autocompletion=completion.overrides,
        ),
    ] = None,
    seeds: Annotated[int | None, Option(help="Repeat each with this many seeds.")] = None,
    out: Annotated[
        Path | None, Option(help="The folder of the run folders. [default: runs/NAME-sweep]")
    ] = None,
    overwrite: Annotated[bool, Option(help="Replace runs that are there.")] = False,
    data: arguments.DataFolder = None,
    ray_address: arguments.RayAddress = None,
    quiet: arguments.Quiet = False,
    as_json: arguments.Json = False,
) -> None:
    """Run every combination of values. The same command continues a sweep that stopped."""
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
    results = swept(points, folder, data, ray_address, quiet, overwrite)
    _finish(results, folder, as_json, quiet)


def swept(
    points: Mapping[str, Experiment],
    folder: Path,
    data: Path | None,
    ray_address: str | None,
    quiet: bool,
    overwrite: bool = False,
) -> dict[str, Result]:
    """Run these points with their progress, after a line about what that will do."""
    from fedlens.runs.sweep import prepare  # it imports PyTorch, which mistakes need not wait for

    arguments.name_cluster(ray_address, {point.engine for point in points.values()})
    with shown(not quiet, counted, "reading images") as reading:
        sweep = prepare(points, folder, overwrite=overwrite, data=data, watch=reading)
    if not quiet:
        notify(f"{folder.name}: {sweep.describe()}")
    with (
        going_on_by("run the same command again to go on"),
        shown(not quiet, in_rounds, folder.name, sweep.total, sweep.done) as watch,
    ):
        return sweep.run(watch)


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


def _finish(results: dict[str, Result], folder: Path, as_json: bool, quiet: bool) -> None:
    from fedlens.report import read_all, report, rows
    from fedlens.report.groups import means

    runs = [folder / name for name in results]
    with once_written():
        if as_json:
            arguments.print_json({name: result.summary for name, result in results.items()})
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
                    say(f"best:   {words}")
            say(f"runs:   {folder}")
        page = report(runs, folder, progress=not quiet)
        if not as_json:
            say(f"report: {page}")
    by_end: dict[str, list[str]] = {}
    for name, result in results.items():
        collapsed = result.status == "finished" and result.summary.get("collapsed") is True
        by_end.setdefault("collapsed" if collapsed else result.status, []).append(name)
    said = {
        "diverged": "{} diverged",
        "invalid": f"{{}} ended with a loss that is {run_files.UNSOUND}",
        "collapsed": "in {} the model gives every image the same class",
    }
    for end in [one for one in said if one in by_end]:
        count = f"{len(by_end[end])} of {len(results)} points"
        warn(f"{said[end].format(count)}: {' '.join(by_end[end])}")
    statuses = {result.status for result in results.values()}
    raise SystemExit(0 if "finished" in statuses else EXIT[min(statuses, key=EXIT.__getitem__)])


def compare_command(
    what: Annotated[
        list[str],
        Argument(
            metavar="[NAME=]WHAT... [KEY=VALUE]...",
            help="Run folders, or a folder of them; or files to run, and settings for all of them. "
            "A name is the variant's.",
        ),
    ],
    by: Annotated[
        str | None, Option(help="The settings that tell variants apart. [default: algorithm]")
    ] = None,
    target: Annotated[
        float | None,
        Option(help="The accuracy that costs are measured to. [default: 90% of the best]"),
    ] = None,
    last: Annotated[
        int | None,
        Option(help="The last evaluations, whose mean is compared. [default: a fifth, up to 10]"),
    ] = None,
    seeds: Annotated[
        int | None, Option(help=f"Runs of each experiment file. [default: {SEEDS}]")
    ] = None,
    out: Annotated[
        Path | None, Option(help="Where the page goes, and the runs of experiment files.")
    ] = None,
    data: arguments.DataFolder = None,
    ray_address: arguments.RayAddress = None,
    quiet: arguments.Quiet = False,
    as_json: arguments.Json = False,
) -> None:
    """Test whether one algorithm is better than another, by seed."""
    from fedlens.report.compare import compare
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
    with written:
        found = compare(variants, by, target, last, out, progress=not quiet)
    if found.left_out:
        warn(f"left out: runs that {found.left_out}")
    if found.unequal:
        warn(found.unequal)
    if as_json:
        arguments.print_json([asdict(pair) for pair in found.pairs])
        return
    if len(found.pairs) > 1:
        print_table(*pair_rows(found.pairs))
        print()
    say(found.summary)
    say(f"report: {found.page}")


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
    return {name: run_files.runs_in(paths) for name, paths in found.items()}


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
    swept(points, out, data, ray_address, quiet)
    return {name: [out / f"{name}-{seed}" for seed in range(seeds)] for name in experiments}
