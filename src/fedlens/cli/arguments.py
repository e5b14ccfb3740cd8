"""Arguments, options and helpers that several commands share."""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
import textwrap
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from fedlens.cli import completion
from fedlens.data.places import existing
from fedlens.storage.reading import argument, printable
from fedlens.storage.run_files import to_json

ExperimentFile = Annotated[Path, Argument(help="An experiment file, TOML or JSON.")]
Overrides = Annotated[
    list[str] | None,
    Argument(
        help="key=value: local.lr=0.1, algorithm.fedprox.mu=0.01 ...",
        autocompletion=completion.overrides,
    ),
]
Seed = Annotated[int | None, Option(help="The seed, in place of the experiment's.")]
DataFolder = Annotated[
    Path | None,
    Option("--data", help="Where to look for named data sets first.", callback=existing),
]
Track = Annotated[
    list[str] | None, Option(help="A tracker to log to as well: tensorboard, wandb ...")
]
RayAddress = Annotated[
    str | None,
    Option(
        "--ray-address",
        help="The Ray cluster of engine ray, HOST:PORT. [default: RAY_ADDRESS, or this machine]",
    ),
]
Quiet = Annotated[bool, Option("--quiet", "-q", help="Show no progress.")]
Json = Annotated[bool, Option("--json", help="Print JSON, and nothing else.")]


def name_cluster(address: str | None, engines: Iterable[str]) -> None:
    """Set RAY_ADDRESS, which Ray reads, to the given address; raise if no engine is ray."""
    if address is None:
        return
    if "ray" not in engines:
        raise ValueError(f"--ray-address {address} is for engine ray: add engine=ray, or omit it")
    os.environ["RAY_ADDRESS"] = address


FULL = (errno.ENOSPC, errno.EDQUOT)  # error numbers of a full disk or an exceeded quota


def say(text: object) -> None:
    """Print a line of results at once, also before what takes long."""
    print(printable(str(text)), flush=True)


def notify(text: object) -> None:
    """Print a line on stderr, so that stdout has results alone."""
    print(printable(str(text)), file=sys.stderr, flush=True)


def warn(text: object) -> None:
    notify(f"fedlens: {text}")


def until_stopped(line: str) -> None:
    """Print a line, and wait for Ctrl-C."""
    print(line, flush=True)
    try:
        while True:
            time.sleep(3600)
    except KeyboardInterrupt:
        print("stopped", flush=True)


def paragraph(text: str) -> str:
    """The text in lines of 80 characters."""
    return textwrap.fill(printable(text), 80)


def refuse_existing(out: Path, *beside: Path, overwrite: bool) -> None:
    """Refuse to replace a file that `--out` names, or one that is written beside it."""
    for path in (out, *beside):
        if path.exists() and not overwrite:
            raise ValueError(f"{path} exists: choose another --out, or add --overwrite")


@contextmanager
def once_written() -> Iterator[None]:
    """Turn a ValueError into an OSError: once files are written, it is no wrong command."""
    try:
        yield
    except ValueError as error:
        raise OSError(str(error)) from error


@contextmanager
def one_value_each(overrides: Iterable[str], grid: str) -> Iterator[None]:
    """Add to a ValueError that `grid` runs several values, if an override has several."""
    try:
        yield
    except ValueError as error:
        values = {one: one.partition("=")[2] for one in overrides}
        several = [one for one, v in values.items() if "," in v and v[0] not in "[{\"'"]
        if not several:
            raise
        hint = f"to go through several values: {grid} {argument(several[0])}"
        raise ValueError(f"{error} ({hint})") from error


def print_json(content: Any) -> None:
    """Print JSON in ASCII, which every terminal shows; numbers that are not finite are null."""
    print(json.dumps(json.loads(to_json(content))), flush=True)


def print_table(header: Sequence[str], body: Sequence[Sequence[str]]) -> None:
    """Print a table, which on a terminal is no wider than that."""
    from fedlens.report.tables import table

    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    print(table(header, body, columns))
