"""`fedlens partition`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from fedlens.cli.arguments import DataFolder, ExperimentFile, Json, Overrides, Quiet, print_json
from fedlens.config.experiment import Experiment
from fedlens.runs.progress import counted, shown
from fedlens.storage.reading import printable


def partition_command(
    experiment: ExperimentFile,
    overrides: Overrides = None,
    seed: Annotated[int | None, typer.Option(help="Which draw of the split.")] = None,
    out: Annotated[Path | None, typer.Option(help="The picture. [default: NAME-split.png]")] = None,
    data: DataFolder = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Show which client holds which classes, before any training."""
    if out is not None and out.suffix != ".png":
        raise ValueError(f"--out {out}: the picture is a PNG file, let its name end in .png")
    chosen = [] if seed is None else [f"clients.seed={seed}"]
    described = Experiment.read(experiment, [*(overrides or []), *chosen])
    from fedlens.data import statistics  # these import PyTorch, which mistakes need not wait for
    from fedlens.setup import federate

    with shown(not quiet, counted, "reading images") as watch:
        dataset, federation = federate(described, data, watch)
    with shown(not quiet, counted, "clients") as watch:
        counts = statistics.Counts.of(federation, watch)
    if as_json:
        print_json(statistics.summary(counts))
    else:
        for line in statistics.describe(counts):
            print(printable(line))
        crossed = statistics.cross_table(counts, dataset.classes)
        if crossed is not None:
            from fedlens.report.tables import table

            print(table(*crossed))
    if out is not None or not as_json:
        from fedlens.report.partition import draw, title_of

        named = described.clients.partition
        title = title_of(dataset.name, named)
        path = out or Path(f"{experiment.stem}-split.png")
        draw(counts.by_class.numpy(), dataset.classes, title, path, counts.names)
        said_to = sys.stderr if as_json else sys.stdout
        print(f"picture: {path}", file=said_to)
        places = [named.options.get(key, key) for key in ("lat", "lon")]
        cells = named.name == "s2" or named.options.get("column") == "cell"
        columns = federation.examples.columns
        if cells and all(name in columns for name in places):
            from fedlens.report.partition import draw_map

            lat, lon = (columns[name].astype(float) for name in places)
            path = path.with_name(f"{path.stem}-map{path.suffix}")
            drawn = draw_map(lat, lon, federation.everyone(0), title, path)
            print(f"map: {drawn}", file=said_to)
