"""A model that is taken away answers as it did in its run."""

import csv
import hashlib
import io
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import fedlens as fl
from fedlens.deploy.classifier import Classifier, Preprocessing
from fedlens.deploy.export import export, real_images
from fedlens.deploy.testing import files_of
from fedlens.runs.records import read
from fedlens.setup import build
from fedlens.storage.run_files import (
    EVALUATION,
    EXPERIMENT,
    MANIFEST,
    MODEL,
    SUMMARY,
    read_summary,
)
from tests.sites import CLASSES, SIDES


def test_a_loaded_model_answers_as_in_its_run(trained):
    classifier = fl.load(trained.run)
    assert not classifier.training and classifier.classes == tuple(CLASSES)
    test = build(fl.Experiment.read(trained.run / EXPERIMENT)).dataset.test
    with torch.no_grad():
        correct = (classifier(test.images).argmax(1) == test.labels).double().mean()
    assert float(correct) == read(trained.run).final("test_accuracy")


def test_images_of_another_size_are_resized_as_files_are(trained):
    preprocessing = fl.load(trained.run).preprocessing
    for site, side in SIDES.items():
        path = trained.images / site / "bag" / "0.jpg"
        pixels = np.array(Image.open(path).convert("RGB"))
        assert pixels.shape == (side, side, 3)
        given = preprocessing(torch.from_numpy(pixels).permute(2, 0, 1)[None])
        as_file = preprocessing(preprocessing.read(path)[None])
        step = 1 / 255 / min(preprocessing.std)
        assert float((given - as_file).abs().max()) <= 1.01 * step


@pytest.mark.parametrize("given", ["floats", "one image", "one channel"])
def test_what_is_no_images_of_bytes_is_refused(trained, given):
    images = torch.zeros(2, 3, 8, 8, dtype=torch.uint8)
    other = {"floats": images / 255, "one image": images[0], "one channel": images[:, :1]}[given]
    with pytest.raises(ValueError, match="uint8"):
        fl.load(trained.run)(other)


def test_predict_names_classes_with_probabilities(trained, here, fedlens):
    ended = fedlens("predict", trained.run, trained.images / "west", "--top", 2)
    rows = list(csv.DictReader(io.StringIO(ended.out)))
    assert (ended.status, len(rows)) == (0, 24)
    assert list(rows[0]) == ["path", "class_1", "probability_1", "class_2", "probability_2"]
    assert {row["class_1"] for row in rows} <= set(CLASSES)
    assert all(float(row["probability_1"]) >= float(row["probability_2"]) for row in rows)
    one = trained.images / "north" / "boot" / "1.jpg"
    (answer,) = json.loads(fedlens("predict", trained.run, one, "--json").out)
    assert answer["path"] == str(one)
    assert sum(each["probability"] for each in answer["classes"]) == pytest.approx(1)


def test_below_a_probability_predict_says_unsure(trained, here, fedlens):
    ended = fedlens("predict", trained.run, trained.images, "--abstain", 0.6, "--top", 1, "-q")
    rows = list(csv.DictReader(io.StringIO(ended.out)))
    assert list(rows[0]) == ["path", "answer", "class_1", "probability_1"]
    for row in rows:
        sure = float(row["probability_1"]) >= 0.6
        assert row["answer"] == (row["class_1"] if sure else "unsure")
    assert {"unsure"} < {row["answer"] for row in rows}
    found = fl.load(trained.run).calibration
    assert found is not None
    share, right = (f"{100 * number:.1f}%" for number in found.unsure(0.6))
    line = f"of {found.images} test images it would have been unsure of {share}; of the others it"
    assert f"fedlens: {line} has {right} right\n" in ended.err
    answers = json.loads(
        fedlens("predict", trained.run, trained.images, "--abstain", 0.6, "--json").out
    )
    assert [one["answer"] or "unsure" for one in answers] == [row["answer"] for row in rows]
    ended = fedlens("predict", trained.run, trained.images, "--abstain", 0.99, "-q")
    assert "it would have been unsure of all\n" in ended.err


@pytest.mark.parametrize("number", [0, 1, -0.5, 0.333, "nan"])
def test_a_probability_is_in_hundredths(trained, here, fedlens, number):
    ended = fedlens("predict", trained.run, trained.images, "--abstain", number)
    assert (ended.status, ended.out) == (2, "") and "hundredths" in ended.err


def test_what_was_not_calibrated_is_never_unsure(trained, here, fedlens):
    run = Path(shutil.copytree(trained.run, here / "plain"))
    (run / EVALUATION).unlink()
    ended = fedlens("predict", run, trained.images, "--abstain", 0.8)
    assert (ended.status, ended.out) == (2, "") and "not calibrated" in ended.err
    fedlens("export", run, "--out", "m.safetensors")
    assert "were not calibrated" in (here / "m.safetensors.md").read_text()
    fedlens("export", trained.run, "--out", "n.safetensors")
    found = fl.load(trained.run).calibration
    assert found is not None
    card = (here / "n.safetensors.md").read_text()
    assert f"on {found.images} test images (temperature {found.temperature:.3g})" in card
    with safe_open("n.safetensors", "pt") as file:
        assert json.loads(file.metadata()["temperature"]) == found.temperature


def test_who_uses_a_model_is_told_what_its_accuracy_hides(trained, here, fedlens):
    run = here / "run"
    shutil.copytree(trained.run, run)
    about = json.loads((run / "evaluation.json").read_text())
    about["confusion"] = [[50, 0, 0, 0], [0, 50, 0, 0], [40, 0, 10, 0]]
    about |= {"client_accuracy": [0.2, 0.9, 0.9], "client_tested": [50, 50, 50]}
    (run / "evaluation.json").write_text(json.dumps(about))
    weak, behind = "It is weak at trouser (recall 20.0%", "Left behind is north (accuracy 20.0%"
    ended = fedlens("predict", run, trained.images / "west", "--quiet")
    assert ended.status == 0
    lines = ended.err.splitlines()
    assert lines[0].startswith(f"fedlens: {weak}") and lines[1].startswith(f"fedlens: {behind}")
    fedlens("export", run, "--out", "m.safetensors")
    limits = (here / "m.safetensors.md").read_text().partition("## Limits")[2]
    assert weak in limits and behind in limits
    (run / "rounds.jsonl").unlink()  # of a folder with the model alone nothing is known
    ended = fedlens("predict", run, trained.images / "west", "--quiet")
    assert (ended.status, ended.err) == (0, "")


@pytest.mark.parametrize("number", ["nan", "inf"])
def test_a_model_with_a_number_that_is_not_finite_is_not_used(trained, here, fedlens, number):
    """Not even without a checksum, as of a run of an earlier version."""
    run = Path(shutil.copytree(trained.run, here / "lost"))
    tensors = load_file(run / MODEL)
    next(t for t in tensors.values() if t.is_floating_point()).view(-1)[0] = float(number)
    save_file(tensors, run / MODEL)
    (run / SUMMARY).unlink()
    assert_refused(run, trained.images, fedlens, "finite")


def test_a_model_with_a_flipped_bit_is_not_used(trained, here, fedlens):
    run = Path(shutil.copytree(trained.run, here / "flipped"))
    content = bytearray((run / MODEL).read_bytes())
    content[-3] ^= 1
    (run / MODEL).write_bytes(content)
    assert_refused(run, trained.images, fedlens, "checksum")
    with pytest.raises(ValueError, match="checksum"):
        fl.Result.read(run)


def test_the_checksums_of_a_run_are_those_of_its_models(trained, here):
    """Also after it was run on: in the meantime, the summary has none."""
    run = Path(shutil.copytree(trained.run, here / "longer"))
    before = json.loads((run / SUMMARY).read_text())["sha256"]
    meanwhile = []

    def look(record: dict[str, Any]) -> None:
        if "round" in record:
            meanwhile.append(read_summary(run).get("sha256"))

    fl.resume(run, rounds=4, watch=look)
    after = json.loads((run / SUMMARY).read_text())["sha256"]
    assert after == {MODEL: hashlib.sha256((run / MODEL).read_bytes()).hexdigest()} != before
    assert meanwhile == [None]


def assert_refused(run: Path, images: Path, fedlens: Any, why: str) -> None:
    for words in (["predict", run, images], ["evaluate", run, "--data", images]):
        ended = fedlens(*words, "-q")
        assert (ended.status, ended.out, ended.err.count("\n")) == (2, "", 1) and why in ended.err
    ended = fedlens("export", run, "--out", "model.onnx", "-q")
    assert ended.status == 2 and why in ended.err and not Path("model.onnx").exists()


def test_names_of_classes_write_nothing_but_text_on_a_terminal(trained, here, fedlens):
    run, strange = Path(shutil.copytree(trained.run, here / "strange")), "\x1b[2Jbag\x9b2K"
    manifest = json.loads((run / MANIFEST).read_text())
    manifest["classes"][0] = strange
    manifest["classes"][1] = "=HYPERLINK(0)"
    manifest["classes"][2] = "bag\nwest/bag/7.jpg,boot"  # which would be a line of its own
    (run / MANIFEST).write_text(json.dumps(manifest))
    some = trained.images / "west"
    shown = fedlens("predict", run, some, "--top", 9, "-q").out
    shown += fedlens("export", run, "--out", "model.safetensors", "-q").out
    card = Path("model.safetensors.md").read_text()
    for text in (shown, card):
        assert "\\x1b[2Jbag\\x9b2K" in text
        assert not [c for c in text if not c.isprintable() and c != "\n"]
    assert "'=HYPERLINK(0)" in shown
    assert "bag\\nwest" in shown and "bag\nwest" not in shown
    (answer, *_) = json.loads(fedlens("predict", run, some, "--top", 9, "--json", "-q").out)
    assert strange in [found["class"] for found in answer["classes"]]


def test_predict_names_broken_files_and_answers_the_others(trained, here, fedlens):
    shutil.copy(trained.images / "west" / "bag" / "0.jpg", here / "good.jpg")
    (here / "bad.jpg").write_bytes((here / "good.jpg").read_bytes()[:100])
    ended = fedlens("predict", trained.run, "bad.jpg", "good.jpg")
    assert ended.status == 2
    assert ended.err.startswith("fedlens: bad.jpg cannot be decoded")
    assert ended.out.splitlines()[1].startswith("good.jpg,")
    assert "there is no nowhere.jpg" in fedlens("predict", trained.run, "nowhere.jpg").err
    assert "is not a run folder" in fedlens("predict", here / "no", "good.jpg").err


def test_evaluate_counts_by_class_and_by_site(trained, here, fedlens):
    found = json.loads(fedlens("evaluate", trained.run, "--data", trained.images, "--json").out)
    assert found["images"] == 96
    assert found["by_class"]["trouser"]["images"] == 24
    assert {name: one["images"] for name, one in found["by_client"].items()} == {
        "north": 36, "south": 36, "west": 24,
    }  # fmt: skip
    hits = sum(one["images"] * one["accuracy"] for one in found["by_client"].values())
    assert hits / 96 == pytest.approx(found["accuracy"])
    ended = fedlens("evaluate", trained.run, "--data", trained.images / "west")
    assert [line.split()[:3] for line in ended.out.splitlines() if "boot" in line] == [
        ["class", "boot", "12"]
    ]
    (here / "a").mkdir()
    shutil.copytree(trained.images / "west" / "bag", here / "a" / "bags")
    ended = fedlens("evaluate", trained.run, "--data", "a")
    assert "has the class 'bags', which the model does not have: did you mean 'bag'" in ended.err


def test_evaluate_names_all_files_that_cannot_be_decoded(trained, here, fedlens):
    shutil.copytree(trained.images / "west", here / "west")
    for name in ("bag/0.jpg", "boot/1.jpg"):
        (here / "west" / name).write_bytes(b"no image")
    ended = fedlens("evaluate", trained.run, "--data", "west")
    assert (ended.status, ended.out, ended.err.count("\n")) == (2, "", 1)
    assert "2 images cannot be decoded, west/bag/0.jpg (it is cut short, or no image)" in ended.err
    assert ended.err.endswith(
        "west/boot/1.jpg (it is cut short, or no image): repair or take them out\n"
    )


def test_evaluate_counts_apart_what_the_run_trained_on(trained, here, fedlens):
    """Copies under other names, too: it is their content that was seen."""
    shutil.copytree(trained.images / "west", here / "copies" / "west")
    ended = fedlens("evaluate", trained.run, "--data", "copies", "--json")
    found = json.loads(ended.out)
    dataset = build(fl.Experiment.read(trained.run / EXPERIMENT)).dataset
    seen = int((dataset.train.columns["site"] == "west").sum())
    assert 0 < seen < 24
    assert (found["trained_on"]["images"], found["new"]["images"]) == (seen, 24 - seen)
    hits = sum(found[part]["images"] * found[part]["accuracy"] for part in ("trained_on", "new"))
    assert hits / 24 == pytest.approx(found["accuracy"])
    assert f"trained on {seen} of these 24 images" in ended.err
    Image.new("RGB", (24, 24)).save(here / "copies" / "west" / "bag" / "0.jpg")
    for path in [*(here / "copies").rglob("*.jpg")]:
        if path.name != "0.jpg" or path.parent.name != "bag":
            path.unlink()
    shutil.rmtree(here / "copies" / "west" / "boot")
    ended = fedlens("evaluate", trained.run, "--data", "copies")
    assert (ended.status, ended.err) == (0, "")


def test_evaluate_says_where_it_cannot_tell_what_the_run_trained_on(trained, here, fedlens):
    images, run = here / "images", here / "run"
    shutil.copytree(trained.images, images)
    shutil.copytree(trained.run, run)
    file = run / EXPERIMENT
    text = file.read_text()
    file.write_text(text.replace(str(trained.images), str(images)))
    assert "the run trained on" in fedlens("evaluate", run, "--data", images).err
    moved = images.rename(here / "moved")
    ended = fedlens("evaluate", run, "--data", moved, "-q")
    assert ended.status == 0
    assert ended.err.strip() == (
        f"fedlens: it is not known which of these the run trained on: {images} is gone: if it was "
        f"moved, set dataset.path in {file} to where it is"
    )
    file.write_text(text.replace(str(trained.images), str(moved)))
    ended = fedlens("evaluate", run, "--data", moved, "-q")
    assert "it is not known" not in ended.err
    assert "trained on 7" in ended.err
    lines = text.splitlines()
    (own,) = [line for line in lines if line.startswith("dataset")]
    file.write_text(text.replace(own, 'dataset = "fashion-mnist-mini"'))
    ended = fedlens("evaluate", run, "--data", moved, "--json")
    assert "the run trained on: it was given fashion-mnist-mini, and no image files" in ended.err
    assert "trained_on" not in json.loads(ended.out)


def on_real_images(trained, run):
    """That another runtime takes files for what `predict` takes them for."""
    classifier = fl.load(trained.run)
    for path in sorted(trained.images.rglob("1*.jpg")):
        pixels = np.array(Image.open(path).convert("RGB")).transpose(2, 0, 1)[None]
        (answer,) = classifier.predict([path])
        found = run(np.ascontiguousarray(pixels))[0]
        name, share = answer.classes[0]
        assert float(found.max()) == pytest.approx(share, abs=0.02)
        assert classifier.classes[int(found.argmax())] == name


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_torchscript_answers_alike(trained, here, fedlens):
    ended = fedlens("export", trained.run, "--out", "m.pt")
    assert ended.status == 0 and "checked" in ended.out
    loaded = torch.jit.load("m.pt")
    on_real_images(trained, lambda pixels: loaded(torch.from_numpy(pixels)).detach().numpy())


def test_onnx_answers_alike(trained, here, fedlens):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    ended = fedlens("export", trained.run, "--out", "m.onnx")
    assert ended.status == 0 and "checked" in ended.out
    session = onnxruntime.InferenceSession("m.onnx", providers=["CPUExecutionProvider"])
    on_real_images(trained, lambda pixels: session.run(None, {"images": pixels})[0])
    kept = session.get_modelmeta().custom_metadata_map
    assert json.loads(kept["classes"]) == list(CLASSES)


def test_without_the_extra_one_line_says_so(trained, here, fedlens, monkeypatch):
    monkeypatch.setattr("fedlens.deploy.export.find_spec", lambda _: None)
    ended = fedlens("export", trained.run, "--out", "m.onnx")
    assert (ended.status, list(here.glob("m.*"))) == (2, [])
    assert "pip install 'fedlens[export]'" in ended.err


def test_safetensors_say_how_images_are_prepared(trained, here, fedlens):
    assert fedlens("export", trained.run, "--out", "m.safetensors").status == 0
    with safe_open("m.safetensors", "pt") as file:
        about = file.metadata()
    preprocessing = fl.load(trained.run).preprocessing
    assert json.loads(about["classes"]) == list(CLASSES)
    assert tuple(json.loads(about["mean"])) == preprocessing.mean


def test_the_card_says_who_how_and_how_well(trained, here, fedlens):
    fedlens("export", trained.run, "--out", "m.safetensors")
    card = (here / "m.safetensors.md").read_text()
    for words in ("west had no training images of trouser", "| north |", "95% interval", "fedavg"):
        assert words in card
    assert "folder: hospitals" in card
    assert "Turn photos upright first" in card


def test_the_card_says_whether_test_images_are_copies_of_training_images(trained, here, fedlens):
    images, run = here / "images", here / "run"
    shutil.copytree(trained.images, images)
    shutil.copytree(trained.run, run)
    text = (run / EXPERIMENT).read_text()
    (run / EXPERIMENT).write_text(text.replace(str(trained.images), str(images)))

    def card():
        assert fedlens("export", run, "--out", "m.safetensors", "--overwrite").status == 0
        return (here / "m.safetensors.md").read_text()

    assert " test images. None of these files was trained on." in card()
    seen = [file for file in files_of(run).train if "north" in file.parts]
    unseen = sorted({*(images / "west").rglob("*.jpg")} - {*files_of(run).train})
    shutil.copy(seen[0], unseen[0])
    assert "set apart from the training images, but 1 of them is a copy of a training im" in card()
    shutil.copy(seen[1], unseen[1])
    assert "set apart from the training images, but 2 of them are copies of training i" in card()
    for file in sorted({*images.rglob("*.jpg")} - {*files_of(run).train}):
        shutil.copy(seen[0], file)
    assert "set apart from the training images, but all of them are copies of training" in card()
    images.rename(here / "moved")  # nobody can tell any more
    assert " test images, set apart from the training images. " in card()


def test_files_of_one_name_have_a_card_each(trained, here, fedlens):
    for name in ("m.safetensors", "m.weights"):
        ended = fedlens("export", trained.run, "--out", name, "--format", "safetensors")
        assert f"card:  {name}.md" in ended.out
    assert (here / "m.safetensors.md").read_text().startswith("# m.safetensors\n")
    assert (here / "m.weights.md").read_text().startswith("# m.weights\n")


def test_a_name_and_a_format_that_contradict_each_other_are_refused(trained, here, fedlens):
    ended = fedlens("export", trained.run, "--out", "m.onnx", "--format", "safetensors")
    line = "fedlens: --out m.onnx ends as onnx, but --format is safetensors: change one\n"
    assert (ended.status, ended.out, ended.err) == (2, "", line)
    assert not list(here.glob("m.*"))
    ended = fedlens("export", trained.run, "--out", "m.xyz")
    assert ended.status == 2 and ".onnx, .pt, .safetensors" in ended.err


@pytest.mark.parametrize("there", ["m.safetensors", "m.safetensors.md"])
def test_a_file_that_is_there_is_replaced_only_where_that_is_asked_for(
    trained, here, fedlens, there
):
    (here / there).write_text("mine")
    command = ("export", trained.run, "--out", "m.safetensors")
    line = f"fedlens: {there} exists: choose another --out, or add --overwrite\n"
    assert fedlens(*command) == (2, "", line)
    assert [file.read_text() for file in here.glob("m.*")] == ["mine"]
    assert fedlens(*command, "--overwrite").status == 0
    assert (here / "m.safetensors.md").read_text().startswith("# m.safetensors\n")


def test_an_export_that_answers_otherwise_is_not_written(trained, here, fedlens, monkeypatch):
    def wrong(model, example):
        return b"", lambda images: torch.zeros(len(images), 3)

    monkeypatch.setattr("fedlens.deploy.export._torchscript", wrong)
    ended = fedlens("export", trained.run, "--out", "m.pt")
    assert (ended.status, list(here.glob("m.*"))) == (1, [])
    assert "differs from PyTorch" in ended.err


class Branching(nn.Linear):
    def forward(self, images: Tensor) -> Tensor:
        rows = images.flatten(1)
        return super().forward(rows if rows.sum() > 0 else -rows)


class Decomposing(nn.Linear):
    def forward(self, images: Tensor) -> Tensor:
        return super().forward(torch.linalg.svd(images)[1].flatten(1))


def behind(module: nn.Module) -> Classifier:
    return Classifier(module.eval(), Preprocessing((1, 4, 4), (0.5,), (0.2,)), ("a", "b"))


@pytest.mark.parametrize("kind", ["onnx", "torchscript"])
def test_a_model_that_branches_on_values_is_not_written_as_one_of_its_ways(kind, tmp_path):
    match = r"values of a tensor \(test_deploy.py, line \d+, in forward\).* end in .safetensors"
    with pytest.raises(ValueError, match=match):
        export(behind(Branching(16, 2)), tmp_path / "model", kind)
    assert not [*tmp_path.iterdir()]
    assert export(behind(Branching(16, 2)), tmp_path / "model", "safetensors") is None


def test_what_onnx_does_not_have_is_said_in_one_line(tmp_path):
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    with pytest.raises(ValueError, match="svd") as told:
        export(behind(Decomposing(4, 2)), tmp_path / "model.onnx", "onnx")
    assert "\n" not in str(told.value)
    assert export(behind(Decomposing(4, 2)), tmp_path / "model.pt", "torchscript") == 0


def test_what_is_checked_on_are_images_of_two_sizes():
    shapes = [tuple(images.shape[1:]) for images in real_images(3)]
    assert shapes == [(3, 28, 28), (3, 75, 61)]


def test_a_run_that_is_not_finished_or_whose_model_has_no_name_says_so(trained, tmp_path):
    shutil.copytree(trained.run, tmp_path / "half")
    whole = (tmp_path / "half" / MODEL).read_bytes()
    (tmp_path / "half" / MODEL).write_bytes(whole[:-100])
    with pytest.raises(ValueError, match="cannot be read"):
        fl.load(tmp_path / "half")
    (tmp_path / "half" / MODEL).unlink()
    with pytest.raises(ValueError, match=r"no model\.safetensors"):
        fl.load(tmp_path / "half")
    module = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 10))
    given = fl.Experiment(dataset="fashion-mnist-mini", model=module, rounds=1)
    result = fl.run(given, tmp_path / "own")
    with pytest.raises(ValueError, match=r"fl\.load"):
        fl.load(tmp_path / "own")
    loaded = fl.load(tmp_path / "own", module)
    assert torch.equal(loaded.module.state_dict()["1.bias"], result.model["1.bias"])


@pytest.mark.parametrize(
    ("file", "field", "value"),
    [
        ("manifest.json", "images", {}),
        ("manifest.json", "images", {"floats": False, "shape": None, "mean": [0.5], "std": [1.0]}),
        ("manifest.json", "images", {"floats": False, "shape": [1, 2], "mean": [0], "std": [1]}),
        (
            "manifest.json",
            "images",
            {"floats": False, "shape": [1, 1e9, 1e9], "mean": [0], "std": [1]},
        ),
        ("manifest.json", "parameters", None),
        ("evaluation.json", "part", None),
        ("evaluation.json", "confusion", [None]),
        ("partition.json", "label_counts", [None]),
    ],
)
def test_files_that_are_not_as_a_run_wrote_them_are_named_and_nothing_is_exported(
    trained, here, fedlens, file, field, value
):
    run = Path(shutil.copytree(trained.run, here / "run"))
    content = json.loads((run / file).read_text())
    (run / file).write_text(json.dumps(content | {field: value, "code": 3}))
    ended = fedlens("export", run, "--out", "model.safetensors", "-q")
    assert (ended.status, ended.err.count("\n")) == (2, 1)
    assert ended.err.startswith(f"fedlens: {run}") and "run the experiment again" in ended.err
    assert not list(here.glob("model*"))


def test_a_run_starts_from_the_model_of_another(trained):
    experiment = fl.Experiment.read(trained.run / EXPERIMENT, [f'weights="{trained.run}"'])
    setup = build(experiment)
    assert setup.weights is not None
    assert setup.weights.new_layers == []
    own = fl.load(trained.run).module.state_dict()
    assert torch.equal(setup.network.params["6.weight"], own["6.weight"])


def test_what_is_no_module_is_refused_when_a_run_is_loaded(trained):
    text: Any = "linear"
    with pytest.raises(ValueError, match=r"nn\.Module"):
        fl.load(trained.run, text)
