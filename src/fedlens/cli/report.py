"""`fedlens report`, `fedlens open` and `fedlens watch`: show the results of runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from fedlens.cli.arguments import Quiet, print_table, until_stopped, warn
from fedlens.storage.reading import printable

if TYPE_CHECKING:
    from collections.abc import Iterable

Runs = Annotated[list[Path], Argument(help="Run folders, or a folder of them.")]


def report_command(
    runs: Runs,
    out: Annotated[Path | None, Option(help="The folder for the page.")] = None,
    quiet: Quiet = False,
) -> None:
    """Draw the results of runs: figures, and one HTML page."""
    from fedlens.report import read_all, report, rows
    from fedlens.storage.run_files import runs_in

    if out is not None and out.suffix == ".html":
        raise ValueError(f"--out {out}: name a folder for report.html and its figures")
    say_passed_over(runs)
    runs = runs_in(runs)
    page = report(runs, out, progress=not quiet)
    print_table(*rows(read_all(runs)))
    print(f"report: {printable(str(page))}")


def open_command(run: Annotated[Path, Argument(help="A run, or a folder with a page.")]) -> None:
    """Open the page of a run, a sweep or a comparison."""
    import webbrowser

    page, records = run / "report.html", run / "rounds.jsonl"
    if not page.is_file() or (
        records.is_file() and records.stat().st_mtime > page.stat().st_mtime
    ):  # a run from Python, or one that is not over
        report_command([run])
    else:
        print(f"report: {printable(str(page))}")
    if not webbrowser.open(page.resolve().as_uri()):
        warn("no browser was found: open this file in one")


def say_passed_over(named: Iterable[Path]) -> None:
    """Print the sweep folders that lie next to runs and are not shown."""
    from fedlens.storage.run_files import passed_over

    if found := passed_over(named):
        warn(f"skipped: {' '.join(map(str, found))} (name a sweep's folder, too)")


def watch_command(
    runs: Runs,
    port: Annotated[int, Option(help="Where to listen; 0 is any port.")] = 8377,
    host: Annotated[str, Option(help="The address to listen on.")] = "127.0.0.1",
) -> None:
    """Serve the page of runs while they train; Ctrl-C ends it."""
    from fedlens.report.live import serving
    from fedlens.storage.run_files import runs_in

    say_passed_over(runs)
    with serving(runs_in(runs), host, port) as address:
        until_stopped(f"watching: {address} (Ctrl-C ends)")
