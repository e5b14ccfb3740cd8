"""The verbs of the command line that show what runs came to."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

Runs = Annotated[list[Path], typer.Argument(help="Run folders.")]


def report_command(
    runs: Runs,
    out: Annotated[Path | None, typer.Option(help="Where the page goes.")] = None,
) -> None:
    """Draw what runs came to: figures, and one HTML page that needs nothing else."""
    from fedlens.report import read_all, report, rows, table

    page = report(runs, out)
    print(table(*rows(read_all(runs))))
    print(f"report: {page}")


def compare_command(
    runs: Runs,
    by: Annotated[
        str | None,
        typer.Option(help="The settings that tell variants apart. [default: algorithm]"),
    ] = None,
    target: Annotated[
        float | None,
        typer.Option(help="The accuracy whose price is asked. [default: 90% of the best]"),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Where the page goes.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else.")] = False,
) -> None:
    """Say whether one algorithm is better than another: the same work, paired by seed."""
    from fedlens.report.compare import compare

    found = compare(runs, by, target, out)
    if as_json:
        print(json.dumps([asdict(pair) for pair in found.pairs]))
        return
    for verdict in found.verdicts:
        print(verdict)
    print(f"report: {found.page}")


def watch_command(
    runs: Runs,
    port: Annotated[int, typer.Option(help="Where to listen; 0 is any port.")] = 8377,
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
) -> None:
    """Serve the page about runs while they go on; Ctrl-C ends it."""
    from fedlens.report.live import serving

    with serving(runs, host, port) as address:
        print(f"watching: {address} (Ctrl-C ends)", flush=True)
        try:
            while True:
                time.sleep(3600)
        except KeyboardInterrupt:
            print("watched", flush=True)
