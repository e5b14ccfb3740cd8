"""`fedlens predict`, `serve-model`, `evaluate` and `export`: use a trained model."""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from typer import Argument, Option

from fedlens.cli.arguments import (
    Json,
    Quiet,
    paragraph,
    print_json,
    print_table,
    refuse_existing,
    until_stopped,
    warn,
)
from fedlens.runs.progress import counted, shown, working
from fedlens.storage.run_files import EXPERIMENT, check_run

if TYPE_CHECKING:
    from fedlens.data.pictures import Undecodable
    from fedlens.deploy.classifier import Answer, Classifier

Best = Annotated[bool, Option("--best", help="The model that was best on validation.")]
Client = Annotated[str | None, Option(help="The own model of this client, by its name or number.")]
Top = Annotated[int, Option(help="How many classes to name, the likeliest first.")]
Abstain = Annotated[
    float | None, Option(help='Answer "unsure" below this probability, such as 0.8.')
]
SEEN = ("trained_on", "new")  # images that the run trained on, and other images
TrainedRun = Annotated[Path, Argument(metavar="RUN", help="The folder of a finished run.")]


def predict_command(
    run: TrainedRun,
    images: Annotated[list[Path], Argument(help="Image files, or folders of them.")],
    top: Top = 3,
    abstain: Abstain = None,
    threshold: Annotated[
        float | None,
        Option(help="Of several labels: the probability that one needs. [default: 0.5]"),
    ] = None,
    explain: Annotated[
        Path | None, Option(help="A new folder for pictures of where each answer is seen.")
    ] = None,
    best: Best = False,
    client: Client = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Classify images with the model of a run; prints csv or JSON.

    Where images may have several labels, it prints those that an image has, and all probabilities.
    """
    check_run(run, [EXPERIMENT])  # before PyTorch is imported
    from fedlens.deploy.classifier import image_files, load
    from fedlens.report.page import inert
    from fedlens.storage.files import write_atomically
    from fedlens.storage.reading import printable

    classifier, paths = load(run, best=best, client=client), image_files(images)
    told = _to_know(run, classifier, abstain, is_last=not (best or client))
    several = classifier.multi_label
    if threshold is not None and not (several and 0 < threshold < 1):
        raise ValueError(
            f"--threshold is {threshold:g}: choose a probability, such as 0.5, if images have "
            "several labels, and leave it out if they have one"
        )
    if explain is not None and explain.exists() and (explain.is_file() or any(explain.iterdir())):
        raise ValueError(f"--explain {explain} is there already: name a new folder")
    broken: list[Undecodable] = []
    answers: list[tuple[Answer, dict[str, str | None]]] = []
    with shown(not quiet, counted, "images") as watch:
        sound = classifier.preprocessing.read_all(paths, broken, watch)
        for answer in classifier.answers(sound, top, explain is not None, threshold or 0.5):
            more = {} if abstain is None else {"answer": answer.at_least(abstain)}
            if answer.labels is not None and not as_json:
                more["labels"] = ";".join(answer.labels)
            if explain is not None:
                explain.mkdir(parents=True, exist_ok=True)
                file = explain / f"{len(answers) + 1}-{Path(answer.path).stem}.png"
                write_atomically(file, answer.picture)
                more["heat_map"] = str(file)
            answers.append((answer._replace(picture=b""), more))
    if as_json:
        print_json([answer.plain() | more for answer, more in answers])
    else:
        most = len(classifier.classes) if several else min(top, len(classifier.classes))
        ranks = [
            f"{word}_{rank}" for rank in range(1, most + 1) for word in ("class", "probability")
        ]
        writer = csv.writer(sys.stdout, lineterminator="\n")
        columns = {"answer": abstain, "labels": several, "heat_map": explain}
        writer.writerow(["path", *(name for name, asked in columns.items() if asked), *ranks])
        for answer, more in answers:
            named = [(inert(printable(name)), f"{share:.6f}") for name, share in answer.classes]
            first = (inert(printable("unsure" if x is None else x)) for x in more.values())
            writer.writerow([answer.path, *first, *(cell for pair in named for cell in pair)])
    sys.stdout.flush()
    for line in [*told, *map(str, broken[:-1])]:
        warn(line)
    if broken:
        raise broken[-1]


def _to_know(run: Path, classifier: Classifier, abstain: float | None, is_last: bool) -> list[str]:
    """What who uses a model must know: what its accuracy hides, and how often it is unsure."""
    from fedlens.evaluation.reliability import HELD_OUT
    from fedlens.report.cautions import cautions
    from fedlens.report.numbers import format_number
    from fedlens.runs.records import read
    from fedlens.storage.run_files import ROUNDS

    known, calibration = is_last and (run / ROUNDS).is_file(), classifier.calibration
    told = [one.text for one in cautions(read(run))] if known else []
    if abstain is None:
        return told
    if not 0 < abstain < 1 or round(100 * abstain) != round(100 * abstain, 6):
        raise ValueError(
            f"--abstain is {abstain:g}: choose a probability in hundredths, such as 0.8"
        )
    if calibration is None:
        remedy = (
            "leave it and --client out, and run the experiment with test images or clients.holdout"
        )
        if classifier.multi_label:
            remedy = "an image may have several labels: set --threshold in its place"
        raise ValueError(
            f"--abstain: the probabilities of {run}'s model were not calibrated: {remedy}"
        )
    share, accuracy = calibration.unsure(abstain)
    line = f"of {calibration.images:,} {HELD_OUT[calibration.part]} it would have been unsure of "
    of_rest = f"; of the others it has {format_number(accuracy, True)} right"
    return [*told, f"{line}{format_number(share, True)}{of_rest}" if share < 1 else f"{line}all"]


def serve_model_command(
    run: TrainedRun,
    port: Annotated[int, Option(help="Where to listen; 0 is any port.")] = 8378,
    host: Annotated[str, Option(help="The address to listen on.")] = "127.0.0.1",
    top: Top = 3,
    abstain: Abstain = None,
    best: Best = False,
    client: Client = None,
) -> None:
    """Serve a page for asking a model about photos; Ctrl-C ends it."""
    check_run(run, [EXPERIMENT])  # before PyTorch is imported
    from fedlens.deploy.classifier import load
    from fedlens.deploy.serve import serving_model

    classifier = load(run, best=best, client=client)
    told = _to_know(run, classifier, abstain, is_last=not (best or client))
    with serving_model(classifier, run.resolve().name, host, port, top, abstain, told) as address:
        until_stopped(f"serving: {address} (Ctrl-C ends)")


def evaluate_command(
    run: TrainedRun,
    data: Annotated[
        Path, Option(help="A folder of class folders, of sites or not; or a csv file.")
    ],
    unlabelled: Annotated[
        bool, Option("--unlabelled", help="The classes are unknown: only compare the images.")
    ] = False,
    out: Annotated[Path | None, Option(help="A new folder for a page with a figure.")] = None,
    best: Best = False,
    client: Client = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Test the model of a run on other images, and compare these."""
    check_run(run, [EXPERIMENT])  # before PyTorch is imported
    from fedlens.deploy.classifier import load
    from fedlens.deploy.drift import DRIFT, drift_blocks, drift_rows, in_words
    from fedlens.deploy.testing import Files, files_of, tested_on
    from fedlens.report.page import render_page

    if out is not None:
        refuse_existing(out, overwrite=False)
    classifier = load(run, best=best, client=client)
    known, unknown = Files(), ""
    try:
        known = files_of(run)
    except ValueError as error:
        unknown = str(error)
    with shown(not quiet, counted, "images") as watch:
        found = tested_on(classifier, data, known, watch, not unlabelled)
    if unknown:
        warn(f"it is not known which of these the run trained on: {unknown}")
    if "trained_on" in found:
        count = found["trained_on"]["images"]
        warn(
            f"the run trained on {count:,} of these {found['images']:,} images: its "
            "accuracy on them says little about others"
        )
    drifted = found.get("drift", {})
    if not drifted and (unlabelled or out is not None):
        raise ValueError(
            "these images cannot be compared with the run's own: that needs the files that it was "
            "tested on, and images that it did not train on"
        )
    if out is not None:
        title = f"{run.resolve().name} on {data.resolve().name}"
        page = render_page(title, in_words(drifted), drift_blocks(drifted), out)
    if as_json:
        print_json(found)
        return
    if not unlabelled:
        _print_accuracy(found)
    if drifted:
        print_table(DRIFT, drift_rows(drifted))
        print(paragraph(in_words(drifted)))
    if out is not None:
        print(f"page: {page}")


def _print_accuracy(found: dict[str, Any]) -> None:
    """The accuracy on all images, on those that were trained on and others, by class, by client."""
    from fedlens.report.holdings import LABELS, RANKED, label_rows, measured

    if "by_label" in found:
        print_table(LABELS, label_rows(found["by_label"]))
        print()
    rows = [("", "all", found)]
    rows += [("", key.replace("_", " "), found[key]) for key in SEEN if key in found]
    for key in ("by_class", "by_client"):
        kind = key.removeprefix("by_")
        rows += [(kind, name, about) for name, about in found.get(key, {}).items()]
    body = [
        [kind, name, str(about["images"]), *measured(about["accuracy"], about["images"])]
        for kind, name, about in rows
    ]
    print_table(["", "", "images", "accuracy", "95% interval"], body)
    means = [f" {words} {found[key]:.3f}" for key, words in RANKED.items() if key in found]
    print(f"macro{','.join(means)}, loss {found['loss']:.3f}")


def export_command(
    run: TrainedRun,
    out: Annotated[
        Path, Option(help="The file; its model card is called as it is, with .md after it.")
    ],
    kind: Annotated[
        Literal["onnx", "torchscript", "safetensors"] | None,
        Option("--format", help="onnx, torchscript or safetensors. [default: by the name]"),
    ] = None,
    best: Best = False,
    client: Client = None,
    overwrite: Annotated[bool, Option(help="Replace files that are there.")] = False,
    quiet: Quiet = False,
) -> None:
    """Export the model of a run: ONNX, TorchScript or safetensors. A model card is added."""
    check_run(run, [EXPERIMENT])  # before PyTorch is imported
    from fedlens.deploy.card import card
    from fedlens.deploy.classifier import load
    from fedlens.deploy.export import ENDINGS, export
    from fedlens.storage.files import write_atomically
    from fedlens.storage.reading import reading
    from fedlens.storage.run_files import RERUN

    chosen = kind or ENDINGS.get(out.suffix)
    if chosen is None:
        endings = ", ".join(ENDINGS)
        raise ValueError(f"--out {out}: choose a --format, or let the name end in one of {endings}")
    if ENDINGS.get(out.suffix, chosen) != chosen:
        raise ValueError(
            f"--out {out} ends as {ENDINGS[out.suffix]}, but --format is {chosen}: change one"
        )
    if not out.parent.is_dir():
        raise ValueError(
            f"--out {out}: there is no folder {out.parent}: make it, or choose another"
        )
    beside = out.with_name(f"{out.name}.md")  # so model.onnx and model.pt have separate cards
    refuse_existing(out, beside, overwrite=overwrite)
    with shown(not quiet, working, f"making {out.name}"):
        classifier = load(run, best=best, client=client)
        with reading(run, RERUN):
            about = card(run, out.name, chosen, best, client).encode()
        difference = export(classifier, out, chosen)
    write_atomically(beside, about)
    print(f"model: {out}")
    print(f"card:  {beside}")
    if difference is not None:
        print(f"checked: on real images it differs from PyTorch by {difference:.1g} at most")
