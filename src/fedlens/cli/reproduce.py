"""`fedlens reproduce`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from fedlens.cli import arguments, completion
from fedlens.cli.arguments import notify, once_written, paragraph, print_json, say, warn
from fedlens.cli.stopping import going_on_by
from fedlens.recipes import ScaleName, check_known
from fedlens.runs.progress import counted, in_rounds, percent, shown
from fedlens.runs.spans import span

STORE = Path("results", "papers")  # in a checkout: what findings are drawn from

if TYPE_CHECKING:
    from fedlens.recipes.reproduce import Reproduced, Reproduction, Together


def reproduce_command(
    words: Annotated[
        list[str],
        Argument(
            metavar="ITEM... [KEY=VALUE]...",
            help="PAPER/ITEM, as in `fedlens list recipes`, one or several, which run as one "
            "sweep. And key=value for every run: precision=tf32 ...",
            autocompletion=completion.items,
        ),
    ],
    scale: Annotated[
        ScaleName | None,
        Option(help="smoke: seconds; small: minutes; paper: its own settings. [default: small]"),
    ] = None,
    seeds: Annotated[
        int | None, Option(help="Seeds of each run, in place of the recipe's number.")
    ] = None,
    out: Annotated[
        Path | None,
        Option(
            help="The folder; of several items, the folder of all their PAPER/ITEM-SCALE. "
            "[default: reproductions/PAPER/ITEM-SCALE]"
        ),
    ] = None,
    overwrite: Annotated[bool, Option(help="Run again what is there already.")] = False,
    only: Annotated[
        list[str] | None,
        Option(help="Run only experiments with such names: 'iid, *'. May be repeated."),
    ] = None,
    only_plan: Annotated[
        bool, Option("--plan", help="Say what would be run and how long it takes; train nothing.")
    ] = False,
    stored: Annotated[
        Path | None,
        Option("--from", help="Draw the page from these runs, a store or a folder; train nothing."),
    ] = None,
    store: Annotated[
        Path | None, Option(help="Take runs that this store has, and pack the others into it.")
    ] = None,
    revision: Annotated[
        str | None, Option(help="The commit of runs for --store that were made without git.")
    ] = None,
    data: arguments.DataFolder = None,
    ray_address: arguments.RayAddress = None,
    quiet: arguments.Quiet = False,
    as_json: arguments.Json = False,
) -> None:
    """Reproduce tables and figures of papers. Finished runs are kept."""
    names = list(dict.fromkeys(word for word in words if "=" not in word))
    for name in names:
        check_known(name)  # before PyTorch is imported
    from fedlens.recipes.store import FINDINGS, read_index

    overrides = [word for word in words if "=" in word]
    is_bare = not (scale or stored or store or seeds or only or overrides or only_plan)
    is_finding = len(names) == 1 and names[0].startswith(f"{FINDINGS}/")
    if is_bare and is_finding and names[0] in read_index(STORE):
        stored, scale, overwrite = STORE, "paper", False  # its page is drawn anew each time
    scale = scale or "small"
    if store is None and revision is not None:
        raise ValueError(f"--revision {revision} is for --store: add that, or omit it")
    if store is not None and scale != "paper":
        raise ValueError(f"--store is for runs of --scale paper, not {scale}")
    if stored is not None:
        from fedlens.recipes.stored import keep, redraw

        if (overrides and store is None) or seeds is not None or overwrite or only_plan or only:
            raise ValueError(
                "--from trains nothing: leave key=value, --seeds, --only, --overwrite, --plan"
            )
        if len(names) != 1:
            raise ValueError(f"--from draws one page, not {len(names)}: name one table or figure")
        drawn = redraw(names[0], scale, stored, out, data=data, progress=not quiet)
        if store is not None:
            keep(store, names[0], drawn.results, overrides, revision)
        _print({names[0]: drawn}, scale, as_json)
        return
    from fedlens.recipes.reproduce import Together, plan_all

    changed = [text.partition("=") for text in overrides]  # recipes do not set engine ray
    arguments.name_cluster(
        ray_address, [value.strip("\"'") for key, _, value in changed if key == "engine"]
    )
    planned = plan_all(
        names,
        scale,
        out,
        data=data,
        seeds=seeds,
        overrides=overrides,
        overwrite=overwrite and not only_plan,
        only=only or (),
    )
    if store is not None and not only_plan:
        from fedlens.recipes.stored import keep, take

        for one in planned:
            take(store, one, overrides)
    for name in names if not quiet else ():
        if name not in [one.name for one in planned]:
            notify(f"{name}: none of its experiments has such a name")
    runs = Together(planned)
    title = planned[0].name if len(planned) == 1 else f"{len(planned)} items"
    left = [one.name for one in planned if one.left]
    for one in planned:
        if one.recipe.stand_in and (only_plan or (one.name in left and not quiet)):
            notify(f"{one.name}: {one.recipe.stand_in}")
    if only_plan or (scale == "paper" and left and not quiet):
        _say_how_long(title, runs, quiet)
    if only_plan:
        return
    with going_on_by("run the same command again to go on"):
        if left:
            with shown(not quiet, in_rounds, title, runs.rounds, runs.rounds_done) as told:
                runs.run(told)
        with once_written():
            done, failed = _pages(planned, quiet)
            if store is not None:
                for name, drawn in done.items():
                    keep(store, name, drawn.results, overrides, revision)
    _print(done, scale, as_json, as_list=len(names) > 1)
    for error in failed[:-1]:
        warn(str(error))
    for error in failed[-1:]:
        raise error


def _pages(
    planned: Sequence[Reproduction], quiet: bool
) -> tuple[dict[str, Reproduced], list[Exception]]:
    """Draw the pages of items: those by name, and the errors of pages that failed.

    With a single item, its error is raised.
    """
    from fedlens.recipes.reproduce import show

    done: dict[str, Reproduced] = {}
    failed: list[Exception] = []
    for one in planned:
        try:
            done[one.name] = show(one, progress=not quiet)
        except Exception as error:
            if len(planned) == 1:
                raise
            is_mistake = isinstance(error, ValueError)
            failed.append(OSError(f"{one.name}: {error}") if is_mistake else error)
    return done, failed


def _print(
    done: Mapping[str, Reproduced], scale: ScaleName, as_json: bool, as_list: bool = False
) -> None:
    """Print for each item our numbers beside the published ones, and the path of the page."""
    if as_json:
        told = [_summary(name, scale, one) for name, one in done.items()]
        print_json(told if as_list else told[0])
        return
    for number, (name, one) in enumerate(done.items()):
        if number:
            print()
        if as_list:
            print(f"{name}\n")
        _print_one(one)


def _print_one(done: Reproduced) -> None:
    from fedlens.recipes.page import OPENING
    from fedlens.report.blocks import Table, Text
    from fedlens.report.numbers import format_number

    tables = [block for block in done.blocks if isinstance(block, Table)]
    for found in [one for one in tables if one.published] or tables[:1]:
        say(found.title)
        print()
        rows = [[format_number(cell) for cell in row] for row in found.rows]
        arguments.print_table(found.header, rows)
        print()
        if found.caption:  # it says what was left out
            print(f"{paragraph(found.caption)}\n")
    for block in done.blocks:  # the remarks below the numbers say what these are worth
        if isinstance(block, Text) and block.title == OPENING:
            print(*map(paragraph, block.paragraphs), sep="\n", end="\n\n")
    if runs := next(iter(done.results.runs.values()), None):
        say(f"runs: {runs[0].folder.parent}")
    say(f"page: {done.page}")


def _say_how_long(title: str, runs: Together, quiet: bool) -> None:
    """Print the estimated time of the remaining runs, for each stack of runs."""
    from fedlens.recipes.estimate import Timing

    left, total = runs.left, 0.0
    if left:
        notify(f"{title}: estimating how long it will take ...")
        timing = Timing(left.values(), runs.planned[0].scale.data)
        stages = [{runs.names[place]: one for place, one in stage.items()} for stage in runs.stages]
        with shown(not quiet, counted, f"{title}: timing", percent) as watch:
            found = timing.sweeps(stages, watch)
        for estimated in found:
            total += estimated.seconds
            first, others = estimated.names[0], len(estimated.names) - 1
            beside = f" and {others} more, side by side" if others else ""
            notify(f"{first}{beside}: about {span(estimated.seconds)}")
    on_cluster = any(cell.engine == "ray" for cell in left.values())
    where = "the Ray cluster" if on_cluster else "this machine"
    what = f"{len(left)} run{'' if len(left) == 1 else 's'} of {runs.count} to do"
    notify(f"{title}: {what}, about {span(total)} on {where}")


def _summary(recipe: str, scale: ScaleName, done: Reproduced) -> dict[str, Any]:
    runs = [
        {"cell": cell, "folder": str(run.folder), "status": run.status, **run.summary["final"]}
        for cell, of_cell in done.results.runs.items()
        for run in of_cell
    ]
    return {"recipe": recipe, "scale": scale, "page": str(done.page), "runs": runs}
