"""`fedlens import`."""

from __future__ import annotations

import csv
import io
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from fedlens.cli.arguments import Quiet, refuse_existing
from fedlens.runs.progress import counted, shown

if TYPE_CHECKING:
    from fedlens.data.pictures import Part
    from fedlens.data.survey import Survey

PARTS: tuple[Part, ...] = ("train", "validation", "test")
ROUNDS = 30
NUM_CLIENTS = 10  # if there are no sites
MOST_TOLD = 20  # lines of one kind at most: with many sites, most of them lack some class


def import_command(
    folder: Annotated[Path, typer.Argument(help="A folder of images.")],
    out: Annotated[
        Path | None, typer.Option(help="The experiment file. [default: NAME.toml]")
    ] = None,
    layout: Annotated[
        Literal["class", "site/class", "class/site"] | None,
        typer.Option(help="What the folders stand for, the outermost first."),
    ] = None,
    megapixels: Annotated[
        float | None, typer.Option(help="Leave out images of more. [default: 100]")
    ] = None,
    overwrite: Annotated[bool, typer.Option(help="Replace files that are there.")] = False,
    quiet: Quiet = False,
) -> None:
    """Inspect a folder of images, and write an experiment for it."""
    from fedlens.data.pictures import MEGAPIXELS
    from fedlens.data.survey import survey
    from fedlens.storage.files import write_atomically
    from fedlens.storage.reading import argument, printable
    from fedlens.storage.run_files import is_run, runs_in
    from fedlens.storage.tables import to_toml

    if runs := [one for one in runs_in(folder) if is_run(one)]:
        raise ValueError(f"{folder} has runs in it, as {runs[0]}: name a folder of images")
    described = out or Path(f"{folder.resolve().name}.toml")
    if described.suffix != ".toml":
        raise ValueError(f"--out {described}: let its name end in .toml")
    listed = described.with_suffix(".csv")
    refuse_existing(described, listed, overwrite=overwrite)
    with shown(not quiet, counted, "images") as watch:
        found = survey(folder, layout, watch, megapixels or MEGAPIXELS)
    experiment = _experiment(found, listed, megapixels)
    write_atomically(listed, _rows(found, listed.parent).encode())
    write_atomically(described, to_toml(experiment).encode())
    for line in _told(found):
        print(printable(line))
    print(f"images:     {listed}")
    print(f"experiment: {described}")
    print(f"next:       fedlens run {argument(described)}")


def _rows(found: Survey, base: Path) -> str:
    """The content of the csv file, without images that cannot be decoded."""
    has_split = any(one.split for one in found.seen)
    header = [
        "path",
        "label",
        *(["client"] if found.sites else []),
        *(["split"] if has_split else []),
    ]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    for one in found.seen:
        path = Path(os.path.relpath(found.folder / one.path, base)).as_posix()
        cells = {"path": path, "label": one.label, "client": one.site, "split": one.split}
        writer.writerow([cells[name] for name in header])
    return text.getvalue()


def _experiment(found: Survey, listed: Path, megapixels: float | None) -> dict[str, Any]:
    dataset: dict[str, Any] = {"name": "csv", "path": listed.name, "channels": found.channels}
    if found.side is not None:
        dataset["size"] = found.side
    if megapixels is not None:
        dataset["megapixels"] = megapixels
    clients: dict[str, Any] = {"count": _num_clients(found), "partition": "iid"}
    if found.sites:
        clients = {"partition": {"name": "natural", "column": "client"}}
    return {
        "dataset": dataset,
        "model": "simple-cnn",
        "rounds": ROUNDS,
        "clients": clients,
        "local": {"epochs": 2, "batch_size": 16, "lr": 0.05},
    }


def _num_clients(found: Survey) -> int:
    """Clients if there are no sites: no more than the images that are left to train on."""
    return min(NUM_CLIENTS, _num_train(found))


def _num_train(found: Survey) -> int:
    """The images that a run of the experiment trains on; refuses those that leave none to test."""
    from fedlens.data.arrays import held_out
    from fedlens.data.pictures import TEST_SHARE

    if found.parts["test"]:
        return found.parts["train"]
    classes = sorted(found.classes)
    labels = [classes.index(one.label) for one in found.seen]
    sites = [one.site or "" for one in found.seen]
    paths = [str(one.path) for one in found.seen]
    return held_out(paths, labels, TEST_SHARE, sites, found.folder).count(False)


def _told(found: Survey) -> list[str]:
    """Lines on what was found and what was assumed."""
    from fedlens.data.class_names import one_class_twice

    classes = ", ".join(f"{name} {count:,}" for name, count in sorted(found.classes.items()))
    sizes = sorted({one.size for one in found.seen})
    shapes = [f"{width}×{height}" for width, height in sizes]
    lines = [f"found {len(found.seen):,} images of {len(found.classes)} classes: {classes}"]
    if found.sites:
        sites = ", ".join(f"{name} {count:,}" for name, count in sorted(found.sites.items()))
        lines.append(f"found {len(found.sites)} site{'s' * (len(found.sites) != 1)}: {sites}")
    if found.laid.part_level is not None:
        parts = found.parts
        told = ", ".join(f"{name} {parts[name]:,}" for name in PARTS if parts[name])
        lines.append(f"found parts, as folders are called: {told}")
    lines += _first([f"missing: {site} has no {label}" for site, label in found.missing])
    lines += _first([f"two names: {line}" for line in one_class_twice(found.classes)])
    lines += _first([f"left out: {line}" for line in found.broken])
    lines += _skipped(found)
    unsure = [(a, b) for a, b in found.twins if a.label != b.label]
    lines += _first(
        [
            f"two classes: {a.path} and {b.path} are the same image: keep the one that is right"
            for a, b in unsure
        ]
    )
    same = [(a, b) for a, b in found.twins if a.label == b.label]
    lines += _first([f"twice: {a.path} and {b.path} are the same image: keep one" for a, b in same])
    if found.layout != "class":
        other = "class/site" if found.layout == "site/class" else "site/class"
        lines.append(
            f"assumed: folders are {found.layout}; else add --layout {other} or --layout class"
        )
        if len(found.sites) == 1 and found.laid.part_level is None:
            (site,) = found.sites
            inside = found.folder / found.seen[0].path.parts[0]
            lines.append(f"assumed: {site} is a site, and the only one; else import {inside}")
    else:
        lines.append(f"assumed: no sites, so {_num_clients(found)} clients get equal random parts")
    if found.laid.remark is not None:
        lines.append(f"assumed: {found.laid.remark}")
    if found.deeper is not None:
        lines.append(f"assumed: folders within those say nothing, such as {found.deeper}")
    if found.side is not None:
        several = f"{len(sizes)} sizes, from {shapes[0]} to {shapes[-1]}"
        lines.append(
            f"assumed: all are resized to {found.side}×{found.side}, for they are of "
            f"{shapes[0] if len(sizes) == 1 else several}; else change size"
        )
    lines.append(f"assumed: {'gray' if found.channels == 1 else 'colour'}; else change channels")
    return lines


def _skipped(found: Survey) -> list[str]:
    """A line on files and folders that were skipped, which need not be a mistake; else none."""
    from fedlens.data.survey import kinds_of

    said, folders = [], found.bare
    if count := found.suffixes.total():
        what = "1 file" if count == 1 else f"{count:,} files"
        said.append(f"{what} that cannot be read as images ({kinds_of(found.suffixes)})")
    if folders:
        names = [folder.as_posix() for folder in folders[:3]] + ["..."] * (len(folders) > 3)
        what = "1 folder" if len(folders) == 1 else f"{len(folders):,} folders"
        said.append(f"{what} without images ({', '.join(names)})")
    return [f"skipped: {', and '.join(said)}"] if said else []


def _first(lines: list[str]) -> list[str]:
    """At most `MOST_TOLD` of the lines, and how many more there are."""
    more = len(lines) - MOST_TOLD
    kind = lines[0].partition(":")[0] if lines else ""
    return [*lines[:MOST_TOLD], f"{kind}: and {more:,} more"] if more > 0 else lines
