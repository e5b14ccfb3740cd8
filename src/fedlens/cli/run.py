"""`fedlens run`, `fedlens resume`."""

from __future__ import annotations

import itertools
import json
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedlens.cli.arguments import (
    FULL,
    DataFolder,
    ExperimentFile,
    Json,
    Overrides,
    Quiet,
    RayAddress,
    Seed,
    Track,
    name_cluster,
    once_written,
    one_value_each,
    print_table,
    warn,
)
from fedlens.cli.stopping import Stopped
from fedlens.config.experiment import Experiment
from fedlens.config.names import EngineName
from fedlens.config.options import check
from fedlens.runs.progress import decoding, in_rounds, shown
from fedlens.storage.reading import argument, printable, reason
from fedlens.storage.run_files import (
    EXPERIMENT,
    MANIFEST,
    SUMMARY,
    UNSOUND,
    Unwritable,
    can_go_on,
    check_run,
    identity,
    last_saved,
    read_experiment,
    read_status,
)

if TYPE_CHECKING:
    from fedlens.report.drawing import Draw

EXIT = {"finished": 0, "invalid": 1, "diverged": 3, "stopped": 4}


def run_command(
    experiment: ExperimentFile,
    overrides: Overrides = None,
    rounds: Annotated[
        int | None, typer.Option(help="Rounds, in place of the experiment's.")
    ] = None,
    seed: Seed = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda ...")] = None,
    out: Annotated[Path | None, typer.Option(help="The run folder. [default: runs/NAME]")] = None,
    overwrite: Annotated[bool, typer.Option(help="Replace a run that is there.")] = False,
    data: DataFolder = None,
    ray_address: RayAddress = None,
    track: Track = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Run one experiment."""
    from fedlens.report.drawing import drawing

    chosen = {"rounds": rounds, "seed": seed, "device": device}
    given = list(overrides or [])
    given += [f"{key}={json.dumps(value)}" for key, value in chosen.items() if value is not None]
    with one_value_each(given, f"fedlens sweep {argument(experiment)} --grid"):
        described = Experiment.read(experiment, given)
    name_cluster(ray_address, [described.engine])
    wanted = Path("runs") / experiment.stem
    place = _placed(out or wanted, overwrite) if out or overwrite else _reserved(wanted)
    # Started before PyTorch is imported, so that matplotlib is imported at the same time.
    with drawing(not quiet) as draw:
        folder, status = _run(described, place, overwrite, data, track or (), quiet)
        finish_run(folder, status, as_json, draw)


def _run(
    described: Experiment,
    place: AbstractContextManager[Path],
    overwrite: bool,
    data: Path | None,
    track: Sequence[str],
    quiet: bool,
) -> tuple[Path, str]:
    """Run the experiment in the folder of `place`; return the folder and the status."""
    from fedlens.data import statistics
    from fedlens.runs.loop import run_to_end
    from fedlens.runs.progress import all_of
    from fedlens.runs.run import say_beforehand, start
    from fedlens.runs.track import tracking
    from fedlens.setup import build

    with (
        place as folder,
        _resume_hint(folder, replaced=identity(folder)),
        tracking(track, folder, described.plain()) as send,
        shown(not quiet, in_rounds, folder.name, described.rounds) as watch,
    ):
        setup = build(described, data, watch=decoding(watch))
        say_beforehand([setup])
        if not quiet:
            clients = setup.federation
            names = clients.described().names
            tests = setup.client_tests
            held_out = len(tests.holdings.index) if tests and tests.part == "train" else 0
            validation = len(setup.parts.get("validation", ()))
            line = statistics.found(setup.dataset, clients.num_clients, names, validation, held_out)
            print(printable(line), file=sys.stderr, flush=True)
        both = all_of(watch, send)
        started = start(described, setup, folder, overwrite=overwrite, watch=both)
        (result,) = run_to_end([started])
    return folder, result.status


def resume_command(
    folder: Annotated[
        Path, typer.Argument(metavar="RUN", help="The folder of a run that stopped.")
    ],
    rounds: Annotated[
        int | None, typer.Option(help="Rounds in all: more, or fewer, than it was started with.")
    ] = None,
    data: DataFolder = None,
    engine: Annotated[
        str | None, typer.Option(help="ray or processes, for a run that began on the other.")
    ] = None,
    ray_address: RayAddress = None,
    track: Track = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Continue a run that stopped, to the same result."""
    from fedlens.report.drawing import drawing
    from fedlens.runs.run import resume
    from fedlens.runs.track import tracking

    check_run(folder, [EXPERIMENT])
    tables = read_experiment(folder)
    chosen: EngineName | None = None if engine is None else check(engine, EngineName, "engine")
    name_cluster(ray_address, [chosen or tables.get("engine", "auto")])
    total = check(tables.get("rounds", 0), int, "rounds") if rounds is None else rounds
    done = last_saved(folder) or 0
    is_over = read_status(folder) == "finished" and total <= done
    with drawing(not quiet) as draw:
        with _resume_hint(folder), tracking(track or (), folder, tables) as send:
            result = resume(
                folder, rounds=rounds, data=data, watch=send, engine=chosen, progress=not quiet
            )
        if is_over:
            warn(
                f"{folder} is finished, so nothing was run: add "
                f"--rounds, more than {done}, to go on"
            )
        finish_run(folder, result.status, as_json, draw)


def finish_run(folder: Path, status: str, as_json: bool, draw: Draw) -> None:
    """Print the results of a run that is over, write its page, and exit with its status."""
    from fedlens.report import read_all, report, rows
    from fedlens.report.cautions import cautions
    from fedlens.report.holdings import client_header, client_rows, worth
    from fedlens.report.personal import HEADER as PERSONAL
    from fedlens.report.personal import personal_rows
    from fedlens.report.privacy import privacy_line
    from fedlens.runs.loop import unsound_losses
    from fedlens.runs.records import settings

    with once_written():
        (run,) = read_all([folder])
        told = [textwrap.fill(printable(one.text), 80) for one in cautions(run)]
        if as_json:
            print((folder / SUMMARY).read_text(encoding="utf-8"), end="", flush=True)
            print(*told, sep="\n", end="\n" if told else "", file=sys.stderr)
        else:
            print_table(*rows([run]))
            named = run.partition is not None and "client_names" in run.partition
            if named and (clients := client_rows(run)):
                print()
                print_table(client_header(run), clients)
                print()
            if own := personal_rows(run):
                print()
                print_table(PERSONAL, own)
                print()
            if line := privacy_line(run):
                print(textwrap.fill(printable(f"{line}."), 80))
            for line in worth(run):
                print(textwrap.fill(line, 80))
            print(*told, sep="\n", end="\n" if told else "")
            if status == "finished" and run.summary.get("reason"):
                print(f"ended:  {printable(str(run.summary['reason']))}")
            # Flushed at once, since the page takes longer than some runs.
            print(f"run:    {printable(str(folder))}", flush=True)
        page = report([folder], draw=draw)
        if not as_json:
            print(f"report: {printable(str(page))}")
    listed = run.manifest.get("left_out")
    left_out = len(listed) if isinstance(listed, list) else 0
    if left_out:
        images = "1 image was" if left_out == 1 else f"{left_out:,} images were"
        warn(f"{images} left out, listed in {folder / MANIFEST}")
    smaller, count = f"a smaller {_step_size(settings(run.experiment))}", len(run.rounds)
    if wrong := unsound_losses(run.rounds) if status == "invalid" else []:
        warn(
            f"the run is over, but its final {' and '.join(wrong)} is {UNSOUND}: "
            f"look at the test images and at the model, or try {smaller}"
        )
    elif run.summary.get("collapsed") and status != "diverged":
        warn(
            f"after {count} round{'' if count == 1 else 's'} the model gives every image the same "
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
    command = f"fedlens resume {argument(folder)}"
    try:
        yield
    except KeyboardInterrupt as error:
        if can_go_on(folder, replaced):
            raise Stopped(f"go on with: {command}") from error
        raise
    except OSError as error:
        is_denied = isinstance(error, Unwritable)
        if not (is_denied or error.errno in FULL) or not can_go_on(folder, replaced):
            raise
        if is_denied:
            raise OSError(f"{error}: go on with: {command}") from error
        raise OSError(
            f"{folder} cannot be written ({reason(error)}): free some space, and go on with: "
            f"{command}"
        ) from error
