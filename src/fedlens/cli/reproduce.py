"""`fedlens reproduce`."""

from __future__ import annotations

import itertools
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedlens.cli import completion
from fedlens.cli.arguments import (
    DataFolder,
    Json,
    Quiet,
    RayAddress,
    name_cluster,
    once_written,
    print_json,
    watching,
)
from fedlens.recipes import ScaleName

if TYPE_CHECKING:
    from fedlens.recipes.reproduce import Reproduced, Reproduction


def reproduce_command(
    recipe: Annotated[
        str,
        typer.Argument(
            help="PAPER/ITEM, as `fedlens list recipes` has them.",
            autocompletion=completion.recipes,
        ),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            help="key=value for every run: precision=tf32 ...",
            autocompletion=completion.overrides,
        ),
    ] = None,
    scale: Annotated[
        ScaleName, typer.Option(help="smoke: seconds; small: minutes; paper: its own settings.")
    ] = "small",
    seeds: Annotated[
        int | None, typer.Option(help="So many of each run, in place of the recipe's number.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The folder. [default: reproductions/PAPER/ITEM-SCALE]")
    ] = None,
    overwrite: Annotated[bool, typer.Option(help="Run again what is there already.")] = False,
    only: Annotated[
        list[str] | None,
        typer.Option(help="Run experiments of such names alone: 'iid, *'. May be repeated."),
    ] = None,
    only_plan: Annotated[
        bool, typer.Option("--plan", help="Say what would be run and how long; train nothing.")
    ] = False,
    stored: Annotated[
        Path | None,
        typer.Option("--from", help="Draw the page from the runs in this folder; train nothing."),
    ] = None,
    data: DataFolder = None,
    ray_address: RayAddress = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Run a table or figure of a paper, with ours beside theirs. What is done is kept."""
    from fedlens.report.artists import artists
    from fedlens.runs import progress

    if stored is not None:
        from fedlens.recipes.stored import redraw

        if overrides or seeds is not None or overwrite or only_plan or only:
            raise ValueError(
                "--from trains nothing: leave key=value, --seeds, --only, --overwrite, --plan"
            )
        with artists() as drawing, watching(quiet, progress.counted, "figures") as watch:
            drawn = redraw(recipe, scale, stored, out, data=data, watch=watch, artists=drawing)
        _print(recipe, scale, drawn, as_json)
        return
    from fedlens.recipes.reproduce import plan, run_cells, show

    changed = [text.partition("=") for text in overrides or ()]  # no recipe has engine ray itself
    name_cluster(ray_address, [value.strip("\"'") for key, _, value in changed if key == "engine"])
    planned = plan(
        recipe,
        scale,
        out,
        data=data,
        seeds=seeds,
        overrides=overrides or (),
        overwrite=overwrite and not only_plan,
        only=only or (),
    )
    left = planned.left
    if planned.recipe.stand_in and (only_plan or (left and not quiet)):
        print(f"{planned.name}: {planned.recipe.stand_in}", file=sys.stderr, flush=True)
    if only_plan or (scale == "paper" and left and not quiet):
        _say_how_long(planned)
    if only_plan:
        return
    try:
        if left:
            about = planned.name, planned.rounds, planned.rounds_done
            with watching(quiet, progress.rounds, *about) as told:
                run_cells(planned, told)
        with (
            once_written(),
            artists() as drawing,
            watching(quiet, progress.counted, "figures") as watch,
        ):
            done = show(planned, watch, drawing)
    except KeyboardInterrupt:
        print(
            "\nfedlens: stopped; the same command goes on where this one was",
            file=sys.stderr,
        )
        raise
    _print(recipe, scale, done, as_json)


def _print(recipe: str, scale: ScaleName, done: Reproduced, as_json: bool) -> None:
    """Ours beside theirs, and where the page is."""
    if as_json:
        print_json(_summary(recipe, scale, done))
        return
    from fedlens.recipes.page import OPENING
    from fedlens.report.blocks import Table, Text
    from fedlens.report.numbers import format_number
    from fedlens.report.tables import table

    for block in done.blocks:
        if isinstance(block, Table) and block.published:
            print(f"{block.title}\n")
            print(
                table(block.header, [[format_number(cell) for cell in row] for row in block.rows])
                + "\n"
            )
    for block in done.blocks:  # below the numbers, so that nobody takes them for more than they are
        if isinstance(block, Text) and block.title == OPENING:
            print("\n".join(textwrap.fill(words, 80) for words in block.paragraphs) + "\n")
    for runs in itertools.islice(done.results.runs.values(), 1):
        print(f"runs: {runs[0].folder.parent}")
    print(f"page: {done.page}")


def _say_how_long(planned: Reproduction) -> None:
    """The time that the runs still to be made will take here, stack by stack."""
    from fedlens.recipes.estimate import Timing
    from fedlens.runs.progress import span

    count, total = len(planned.left), 0.0
    if count:
        print(f"{planned.name}: timing some rounds of each kind of run ...", file=sys.stderr)
        timing = Timing(planned.left.values(), planned.scale.data)
        for stage in planned.stages:
            for one in timing.sweep({place.name: cell for place, cell in stage.items()}):
                total += one.seconds
                first, others = one.names[0], len(one.names) - 1
                beside = f" and {others} more, side by side" if others else ""
                print(f"{first}{beside}: about {span(one.seconds)}", file=sys.stderr, flush=True)
    on_cluster = any(cell.engine == "ray" for cell in planned.left.values())
    where = "the Ray cluster" if on_cluster else "this machine"
    print(
        f"{planned.name}: {count} run{'' if count == 1 else 's'} of {len(planned.chosen)} to do, "
        f"about {span(total)} on {where}",
        file=sys.stderr,
        flush=True,
    )


def _summary(recipe: str, scale: ScaleName, done: Reproduced) -> dict[str, Any]:
    runs = [
        {"cell": cell, "folder": str(run.folder), "status": run.status, **run.summary["final"]}
        for cell, of_cell in done.results.runs.items()
        for run in of_cell
    ]
    return {
        "recipe": recipe,
        "scale": scale,
        "page": str(done.page),
        "runs": runs,
    }
