"""`fedlens data`: list, download, prepare and verify data sets."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedlens.cli import completion
from fedlens.cli.arguments import DataFolder, Json, Quiet, print_json
from fedlens.runs.progress import counted, megabytes, shown

data_app = typer.Typer(no_args_is_help=True, help="List, download, verify and prepare data sets.")

Into = Annotated[
    Path | None, typer.Option("--data", help="Where to put it. [default: FEDLENS_DATA or cache]")
]


@data_app.command("list")
def data_list(data: DataFolder = None, as_json: Json = False) -> None:
    """What data sets there are, and where each was found."""
    from fedlens.data import Source
    from fedlens.data.fetch import listing

    rows = listing(Source(data))
    if as_json:
        print_json([row._asdict() for row in rows])
        return
    from fedlens.report.tables import table

    body = [[row.name, row.contents, row.where or "not here"] for row in rows]
    print(table(["data set", "contents", "where"], body))


@data_app.command("get")
def data_get(
    name: Annotated[str, typer.Argument(help="The data set.", autocompletion=completion.data_sets)],
    have: Annotated[
        Path | None, typer.Option("--from", help="Files you already have: a folder or an archive.")
    ] = None,
    data: Into = None,
    quiet: Quiet = False,
) -> None:
    """Download a data set, or take files that you have."""
    from fedlens.data import Source
    from fedlens.data.fetch import get, get_from
    from fedlens.data.places import roots

    dest = roots(Source(data))[0]
    if have is not None:
        folder = get_from(name, have, dest)
    else:
        with shown(not quiet, counted, name, megabytes) as watch:
            folder = get(name, dest, progress=watch)
    print(f"{name}: {folder}")


@data_app.command("prepare")
def data_prepare(
    name: Annotated[
        str, typer.Argument(help="The data set.", autocompletion=completion.large_data_sets)
    ],
    metadata: Annotated[
        Path, typer.Option("--from", help="The folder of its split files, or of its metadata.")
    ],
    images: Annotated[Path, typer.Option(help="The folder of its images, at any depth.")],
    size: Annotated[int, typer.Option(help="Images become size × size.")] = 96,
    data: Into = None,
    quiet: Quiet = False,
) -> None:
    """Decode a large data set once. What was stopped goes on where it was."""
    from fedlens.data import Source, store
    from fedlens.data.curation import listing
    from fedlens.data.places import roots

    listed = listing(name, metadata)
    place = roots(Source(data))[0] / f"{name}-{size}"
    with shown(not quiet, counted, name) as watch:
        made = store.prepare(name, listed, images, place, size, watch)
    print(f"{name}: {made['num_train']:,} + {made['num_test']:,} images in {place}")
    if made["num_left_out"]:
        print(f"left out: {made['num_left_out']:,}, listed in {place / 'manifest.json'}")


@data_app.command("check")
def data_check(
    name: Annotated[
        str | None,
        typer.Argument(
            help="The data set. [default: all here]", autocompletion=completion.data_sets
        ),
    ] = None,
    data: DataFolder = None,
) -> None:
    """Verify the files of a data set against the published checksums."""
    from fedlens.data import Source
    from fedlens.data.fetch import check, here, remedy_for

    source = Source(data)
    names = [name] if name else here(source)
    bad = []
    for one in names:
        for file, state in check(one, source):
            print(f"{state:<9} {file}")
            if state not in ("ok", "readable"):
                bad.append(one)
    if bad:
        raise ValueError(f"{bad[0]} is damaged or incomplete: {remedy_for(bad[0])}")
