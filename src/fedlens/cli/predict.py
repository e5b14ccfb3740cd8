"""`fedlens predict`, `fedlens evaluate` and `fedlens export`: use a trained model."""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Argument, Option

from fedlens.cli.arguments import Json, Quiet, print_json, print_table, refuse_existing, warn
from fedlens.runs.progress import counted, shown, working
from fedlens.storage.run_files import EXPERIMENT, check_run

if TYPE_CHECKING:
    from fedlens.data.pictures import Undecodable
    from fedlens.evaluation.reliability import Calibration

Best = Annotated[bool, Option("--best", help="The model that was best on validation.")]
Client = Annotated[str | None, Option(help="The own model of this client, by its name or number.")]
SEEN = ("trained_on", "new")  # images that the run trained on, and other images
TrainedRun = Annotated[Path, Argument(metavar="RUN", help="The folder of a finished run.")]


def predict_command(
    run: TrainedRun,
    images: Annotated[list[Path], Argument(help="Image files, or folders of them.")],
    top: Annotated[int, Option(help="How many classes to name, the likeliest first.")] = 3,
    abstain: Annotated[
        float | None, Option(help='Answer "unsure" below this probability, such as 0.8.')
    ] = None,
    best: Best = False,
    client: Client = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Classify images with the model of a run; prints csv or JSON."""
    check_run(run, [EXPERIMENT])  # before PyTorch is imported
    from fedlens.deploy.classifier import image_files, load
    from fedlens.report.cautions import cautions
    from fedlens.report.page import inert
    from fedlens.runs.records import read
    from fedlens.storage.reading import printable
    from fedlens.storage.run_files import ROUNDS

    classifier, paths = load(run, best=best, client=client), image_files(images)
    has_records = (run / ROUNDS).is_file() and not (best or client)  # of the last model
    told = [one.text for one in cautions(read(run))] if has_records else []
    if abstain is not None:
        told.append(_of_abstaining(run, classifier.calibration, abstain))
    broken: list[Undecodable] = []
    with shown(not quiet, counted, "images") as watch:
        sound = classifier.preprocessing.read_all(paths, broken, watch)
        answers = list(classifier.answers(sound, top))
    if as_json:
        unsure = [{"unsure": each.at_least(abstain) is None} if abstain else {} for each in answers]
        print_json([each.plain() | more for each, more in zip(answers, unsure, strict=True)])
    else:
        most = min(top, len(classifier.classes))
        ranks = [
            f"{word}_{rank}" for rank in range(1, most + 1) for word in ("class", "probability")
        ]
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow(["path", *["answer"] * bool(abstain), *ranks])
        for answer in answers:
            named = [(inert(printable(name)), f"{share:.6f}") for name, share in answer.classes]
            cells = [cell for pair in named for cell in pair]
            if abstain:
                cells.insert(0, inert(answer.at_least(abstain) or "unsure"))
            writer.writerow([answer.path, *cells])
    sys.stdout.flush()
    for line in [*told, *map(str, broken[:-1])]:
        warn(line)
    if broken:
        raise broken[-1]


def _of_abstaining(run: Path, calibration: Calibration | None, least: float) -> str:
    """How often the model would have been unsure on held-out images, and how good its answers."""
    from fedlens.evaluation.reliability import HELD_OUT
    from fedlens.report.numbers import format_number

    if not 0 < least < 1 or round(100 * least) != round(100 * least, 6):
        raise ValueError(f"--abstain is {least:g}: choose a probability in hundredths, such as 0.8")
    if calibration is None:
        raise ValueError(
            f"--abstain: the probabilities of {run}'s model were not calibrated: leave it and "
            "--client out, and run the experiment with test images or clients.holdout"
        )
    share, accuracy = calibration.unsure(least)
    held_out = f"{calibration.images:,} {HELD_OUT[calibration.part]}"
    if share == 1:
        return f"of {held_out} it would have been unsure of all"
    return (
        f"of {held_out} it would have been unsure of {format_number(share, True)}; of the others "
        f"it has {format_number(accuracy, True)} right"
    )


def evaluate_command(
    run: TrainedRun,
    data: Annotated[
        Path, Option(help="A folder of class folders, of sites or not; or a csv file.")
    ],
    best: Best = False,
    client: Client = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Test the model of a run on other images with known classes."""
    check_run(run, [EXPERIMENT])  # before PyTorch is imported
    from fedlens.deploy.classifier import load
    from fedlens.deploy.testing import tested_on, training_files
    from fedlens.report.holdings import measured

    classifier = load(run, best=best, client=client)
    trained_on, unknown = [], ""
    try:
        trained_on = training_files(run)
    except ValueError as error:
        unknown = str(error)
    with shown(not quiet, counted, "images") as watch:
        found = tested_on(classifier, data, trained_on, watch)
    if unknown:
        warn(f"it is not known which of these the run trained on: {unknown}")
    if "trained_on" in found:
        count = found["trained_on"]["images"]
        warn(
            f"the run trained on {count:,} of these {found['images']:,} images: its "
            "accuracy on them says little about others"
        )
    if as_json:
        print_json(found)
        return
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
    print(f"macro F1 {found['f1']:.3f}, loss {found['loss']:.3f}")


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
