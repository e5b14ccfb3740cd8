"""The model card: what a model was trained on, how good it is, and what it is not for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fedlens.deploy.testing import copies_in_test
from fedlens.evaluation.measures import measure_name
from fedlens.evaluation.reliability import HELD_OUT, Calibration
from fedlens.report.cautions import cautions
from fedlens.report.holdings import (
    LABELS,
    client_header,
    client_names,
    client_rows,
    label_rows,
    measured,
)
from fedlens.report.numbers import format_number
from fedlens.runs.records import CHOSEN_BY, PART_NAMES, Run, read, settings, table_in
from fedlens.storage.reading import printable
from fedlens.storage.run_files import BEST, MODEL

FEW = 100  # test images; with fewer, the card has a warning


def card(folder: Path, file: str, kind: str, best: bool = False, client: str | None = None) -> str:
    """The card of a run's model, the last, the best or that of a client, in Markdown."""
    import jinja2
    from markupsafe import Markup

    def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Markup:
        cells = [header, ["---"] * len(header), *rows]
        lines = ("| " + " | ".join(w.replace("|", "\\|") for w in row) + " |" for row in cells)
        return Markup("\n".join(map(printable, lines)))

    run = read(folder)
    flat, partition = settings(run.experiment), run.partition or {}
    classes = [str(name) for name in run.manifest.get("classes", [])]
    path = flat.get("dataset.path")
    known = None if client else Calibration.of(run.evaluation, BEST if best else MODEL)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
        # Names of classes and sites are from files: only tables have lines of their own.
        finalize=lambda value: value if isinstance(value, Markup) else printable(str(value)),
    )
    return environment.get_template("card.md.jinja").render(
        run=run,
        file=file,
        kind=kind,
        classes=classes,
        several=run.manifest.get("multi_label") is True,
        shape=run.manifest["images"]["shape"],
        dataset=f"{flat['dataset']}: {Path(path).name}" if path else flat["dataset"],
        num_clients=partition.get("num_clients"),
        partition=flat.get("clients.partition"),
        held=_held(partition, classes),
        lineage=list(_lineage(run, best)),
        training=[
            ["model", f"{flat['model']}, {run.manifest.get('parameters'):,} parameters"],
            *_start(run.manifest.get("weights")),
            ["algorithm", run.algorithm],
            ["rounds", f"{run.num_rounds} ({run.status})"],
            *([key, str(flat[key])] for key in sorted(flat) if key.startswith("local.")),
            ["seed", str(flat.get("seed"))],
            ["started", str(run.manifest.get("started"))],
        ],
        quality=_quality_of_client(run, client)
        if client is not None
        else _quality_of_best(run)
        if best
        else _quality(run, classes),
        clients=[] if best or client is not None else client_rows(run),
        client_header=client_header(run),
        calibration=known,
        held_out=HELD_OUT[known.part] if known else "",
        cautions=[caution.text for caution in cautions(run)],
        best=best or client is not None,
        limits=list(_limits(run, classes)),
        table=table,
    )


def _start(weights: Any) -> list[list[str]]:
    """A row about the weights that a run started from, if it was given some."""
    if not isinstance(weights, dict):
        return []
    licence = f", licence {weights['licence']}" if weights.get("licence") else ""
    return [["weights", f"{weights.get('source')}, sha256 {weights.get('sha256')}{licence}"]]


def _held(partition: dict[str, Any], classes: Sequence[str]) -> list[list[str]]:
    """How many images of each class each client trained on, if that is not too large a table."""
    counts, names = partition.get("label_counts"), partition.get("client_names")
    if not isinstance(counts, list) or len(counts) > 40 or len(classes) > 12:
        return []
    called = names or [str(client) for client in range(len(counts))]
    rows = zip(called, counts, partition["sizes"], strict=True)
    return [[name, *map(str, row), str(size)] for name, row, size in rows]


def _lineage(run: Run, best: bool) -> Iterator[list[str]]:
    """Whose updates are in the model, by the rounds in which they were used."""
    names, found = client_names(run) or [], run.best(CHOSEN_BY) if best else None
    last = run.num_rounds if found is None else found[1]
    for client, name in enumerate(names):
        used = [
            int(row["round"])
            for row in run.rounds
            if client in (row.get("clients") or ()) and row["round"] <= last
        ]
        yield [name, str(len(used)), _spans(used) or "none"]


def _spans(numbers: Sequence[int]) -> str:
    """Numbers in ascending order, in short: 1 to 4, 7."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(str(a) if a == b else f"{a} to {b}" for a, b in spans)


def _quality(run: Run, classes: Sequence[str]) -> dict[str, Any]:
    """What the card says of the accuracies of the last model, by class; empty if unknown."""
    found, labels = run.evaluation, table_in(run.evaluation, "by_label")
    confusion = found.get("confusion")
    if not isinstance(confusion, list) and not labels:
        return {}
    part = PART_NAMES[str(found.get("part"))]
    if labels:
        share = format_number(run.final(measure_name(found["part"], "accuracy")), True)
        return {
            "words": f"{_tested(run, part, found['tested'])} All labels are right for {share}.",
            "header": LABELS,
            "rows": label_rows(labels),
        }
    assert isinstance(confusion, list)
    sizes = [sum(row) for row in confusion]
    hits = [row[label] for label, row in enumerate(confusion)]
    rows = zip(["all", *classes], [sum(hits), *hits], [sum(sizes), *sizes], strict=True)
    return {
        "words": f"{_tested(run, part, sum(sizes))} The intervals are Wilson's.",
        "header": ["class", "images", "accuracy", "95% interval"],
        "rows": [[name, str(n), *measured(hit / n if n else None, n)] for name, hit, n in rows],
    }


def _tested(run: Run, part: str, count: int) -> str:
    """A sentence on the images it was tested on, with the number of copies of training images."""
    if part == "training":
        return "On the training images: it says nothing of others."
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


def _quality_of_best(run: Run) -> dict[str, Any]:
    """The accuracies in the round of the best model: nothing else is recorded for it."""
    found = run.best(CHOSEN_BY)
    assert found is not None, "it was chosen by this"
    record = next(row for row in run.rounds if row["round"] == found[1])
    return {
        "words": f"It is the model after round {found[1]} of {run.num_rounds}: the best on the "
        "validation images. They were used to choose it, so its accuracy on them is too high.",
        "header": ["images", "accuracy"],
        "rows": [
            [name, format_number(record[measure_name(part, "accuracy")], True)]
            for part, name in PART_NAMES.items()
            if measure_name(part, "accuracy") in record
        ],
    }


def _quality_of_client(run: Run, client: str) -> dict[str, Any]:
    """The accuracy of a client's own model on its own test images."""
    names = client_names(run) or list(map(str, range((run.partition or {})["num_clients"])))
    found = [run.evaluation.get(key) or [] for key in ("client_tested", "client_accuracy")]
    found[1] = run.evaluation.get("federated") or found[1]  # tuned, if clients tune at the end
    own = dict(zip(names, zip(*found, strict=False), strict=False)).get(client, (0, None))
    return {
        "words": f"It is the model of the client {client} alone, tested on images of its own that "
        "nobody trained on.",
        "header": ["images", "accuracy", "95% interval"],
        "rows": [[str(own[0]), *measured(own[1], own[0])]],
    }


def _limits(run: Run, classes: Sequence[str]) -> Iterator[str]:
    """What is wrong with this model; the template says what is wrong with all."""
    partition = run.partition or {}
    counts, names = partition.get("label_counts"), partition.get("client_names")
    if isinstance(counts, list) and names:
        for name, row in zip(names, counts, strict=True):
            absent = [classes[label] for label, count in enumerate(row) if not count]
            if absent and len(absent) <= 5:
                yield f"{name} had no training images of {', '.join(absent)}."
    few = [row[0] for row in client_rows(run) if int(row[2]) < FEW]
    if few and names:
        yield f"Fewer than {FEW} test images are of {', '.join(few)}: see the intervals."
