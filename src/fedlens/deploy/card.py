"""The model card: what a model was trained on, how good it is, and what it is not for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedlens.deploy.testing import copies_in_test
from fedlens.evaluation.intervals import wilson
from fedlens.evaluation.measures import measure_name
from fedlens.report.cautions import cautions
from fedlens.report.numbers import NONE, format_number
from fedlens.report.tables import client_header, client_rows
from fedlens.runs.records import PART_NAMES, Run, read, settings
from fedlens.runs.stopping import CHOSEN_BY
from fedlens.storage.reading import printable

FEW = 100  # test images; with fewer, the card has a warning

CALLS = {
    "onnx": "It takes `images`, bytes [N, {channels}, height, width] of any size, {colour}, and "
    "gives `probabilities` [N, {classes}]. To resize and to normalise is in the graph.",
    "torchscript": "`torch.jit.load` reads it. It takes bytes (uint8) [N, {channels}, height, "
    "width] of any size, {colour}, and gives probabilities [N, {classes}]. To resize and to "
    "normalise is in the graph.",
    "safetensors": "The tensors of the model by name, and nothing that runs. The metadata of the "
    "file have `classes`, `shape`, `mean` and `std`: images are resized to `shape`, scaled to "
    "[0, 1], minus `mean`, divided by `std`.",
}


def card(folder: Path, file: str, kind: str, best: bool = False) -> str:
    """The card of a run's model, the last or the best, in Markdown."""
    run = read(folder)
    flat, manifest = settings(run.experiment), run.manifest
    classes = [str(name) for name in manifest.get("classes", [])]
    channels, height, width = manifest["images"]["shape"]
    call = CALLS[kind].format(
        channels=channels, classes=len(classes), colour="gray" if channels == 1 else "RGB"
    )
    lines = [
        f"# {file}",
        "",
        f"An image classifier of {len(classes)} classes, trained by federated learning with "
        f"Fedlens {manifest.get('fedlens')}, from the run `{run.name}`.",
        "",
        "## How to call it",
        "",
        call,
        "Turn photos upright first, as their EXIF data say (in Pillow: `ImageOps.exif_transpose`): "
        "Fedlens does so with every file.",
        f"The model itself sees {channels}×{height}×{width}. Classes, in the order of the outputs: "
        f"{', '.join(classes)}.",
        "",
        "## Data and clients",
        "",
        *_data(run, flat, classes),
        "",
        "## Training",
        "",
        *_table(
            ["setting", "value"],
            [
                ["model", f"{flat['model']}, {manifest.get('parameters'):,} parameters"],
                ["algorithm", run.algorithm],
                ["rounds", f"{run.num_rounds} ({run.status})"],
                *([[key, str(flat[key])] for key in sorted(flat) if key.startswith("local.")]),
                ["seed", str(flat.get("seed"))],
                ["started", str(manifest.get("started"))],
            ],
        ),
        "",
        "## How good it is",
        "",
        *(_quality_of_best(run) if best else _quality(run, classes)),
        "",
        "## Limits",
        "",
        *_limits(run, classes, best),
    ]
    return "\n".join(map(printable, lines)) + "\n"  # names of classes and sites are from files


def _data(run: Run, flat: dict[str, Any], classes: Sequence[str]) -> list[str]:
    partition = run.partition or {}
    counts, names = partition.get("label_counts"), partition.get("client_names")
    lines = [
        f"Data set `{_called(flat)}`, {partition.get('num_clients')} clients "
        f"(partition `{flat.get('clients.partition')}`)."
    ]
    if isinstance(counts, list) and len(counts) <= 40 and len(classes) <= 12:
        called = names or [str(client) for client in range(len(counts))]
        rows = [
            [name, *map(str, row), str(sum(row))] for name, row in zip(called, counts, strict=True)
        ]
        lines += ["Training images:", "", *_table(["client", *classes, "all"], rows)]
    return lines


def _called(flat: dict[str, Any]) -> str:
    path = flat.get("dataset.path")
    return f"{flat['dataset']}: {Path(path).name}" if path else str(flat["dataset"])


def _quality(run: Run, classes: Sequence[str]) -> list[str]:
    confusion = run.evaluation.get("confusion")
    if not isinstance(confusion, list):
        return ["The run was not evaluated at its end."]
    sizes = [sum(row) for row in confusion]
    hits = [row[label] for label, row in enumerate(confusion)]
    part = PART_NAMES[str(run.evaluation.get("part"))]
    rows = [["all", *_measured(sum(hits), sum(sizes))]]
    rows += [
        [name, *_measured(hit, size)] for name, hit, size in zip(classes, hits, sizes, strict=True)
    ]
    lines = [
        f"{_tested(run, part, sum(sizes))} The intervals are Wilson's."
        if part != "training"
        else "On the training images: it says nothing of others.",
        "",
        *_table(["class", "images", "accuracy", "95% interval"], rows),
    ]
    clients = client_rows(run)
    if clients:
        lines += ["", "Client by client:", "", *_table(client_header(run), clients)]
    return lines


def _tested(run: Run, part: str, count: int) -> str:
    """A sentence on the images it was tested on, with the number of copies of training images."""
    copies = copies_in_test(run.folder, count) if part == "test" else None
    if copies == 0:
        return f"On {count:,} test images. None of these files was trained on."
    but = ""
    if copies == count:
        but = ", but all of them are copies of training images"
    elif copies == 1:
        but = ", but 1 of them is a copy of a training image"
    elif copies:
        but = f", but {copies:,} of them are copies of training images"
    return f"On {count:,} {part} images, set apart from the training images{but}."


def _quality_of_best(run: Run) -> list[str]:
    """The accuracies in the round of the best model: nothing else is recorded for it."""
    found = run.best(CHOSEN_BY)
    assert found is not None, "it was chosen by this"
    record = next(row for row in run.rounds if row["round"] == found[1])
    rows = [
        [name, format_number(record[measure_name(part, "accuracy")], True)]
        for part, name in PART_NAMES.items()
        if measure_name(part, "accuracy") in record
    ]
    return [
        f"It is the model after round {found[1]} of {run.num_rounds}: the best on the validation "
        "images, by which it was chosen: its accuracy on these is too high.",
        "",
        *_table(["images", "accuracy"], rows),
    ]


def _measured(hits: int, count: int) -> list[str]:
    if not count:
        return ["0", NONE, NONE]
    low, high = (format_number(end, True) for end in wilson(hits / count, count))
    return [str(count), format_number(hits / count, True), f"{low} to {high}"]


def _limits(run: Run, classes: Sequence[str], best: bool) -> list[str]:
    partition = run.partition or {}
    of = "Of the run's last model, which this is not: " if best else ""
    lines = [
        *(of + caution.text for caution in cautions(run)),
        "It gives every image one of its classes, also an image of something else.",
        "Its probabilities were not calibrated.",
        "It was tested on images from where the training images are from: test it on yours "
        "(`fedlens evaluate`) before you rely on it.",
        "That data stayed with the clients is no proof that nothing can be learned of them from "
        "the model.",
    ]
    counts, names = partition.get("label_counts"), partition.get("client_names")
    if isinstance(counts, list) and names:
        for name, row in zip(names, counts, strict=True):
            absent = [classes[label] for label, count in enumerate(row) if not count]
            if absent and len(absent) <= 5:
                lines.append(f"{name} had no training images of {', '.join(absent)}.")
    few = [row[0] for row in client_rows(run) if int(row[2]) < FEW]
    if few and names:
        lines.append(f"Fewer than {FEW} test images are of {', '.join(few)}: see the intervals.")
    if run.status != "finished":
        lines.append(f"The run has not finished: it is {run.status}.")
    if run.experiment.get("norm") == "local":
        lines.append("Clients kept normalisation layers of their own, which are not in it.")
    return [f"- {line}" for line in lines]


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    cells = [header, ["---"] * len(header), *rows]
    return ["| " + " | ".join(word.replace("|", "\\|") for word in row) + " |" for row in cells]
