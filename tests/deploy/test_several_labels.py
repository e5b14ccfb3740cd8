"""From a csv file of images with several labels to a model that is asked, tested and exported."""

import csv
import io
import json
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

import fedlens as fl
from fedlens.deploy.serve import serving_model
from tests.deploy.test_serve import asked
from tests.films import FINDINGS, write_films

EXPERIMENT = """
dataset = { name = "csv", path = "films.csv", multi_label = true, channels = 1 }
model = "tests.deploy.conftest:small_cnn"
loss = "binary_cross_entropy"
rounds = 12
engine = "sequential"
local = { batch_size = 8, lr = 0.5, epochs = 2 }
clients = { holdout = 0.2 }
"""


@pytest.fixture(scope="module")
def films(tmp_path_factory) -> Path:
    place: Path = tmp_path_factory.mktemp("films")
    write_films(place)
    (place / "films.toml").write_text(EXPERIMENT)
    fl.run(fl.Experiment.read(place / "films.toml", trust_code=True), place / "run")
    return place


def truth(films: Path) -> dict[str, set[str]]:
    with (films / "films.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    return {row["path"]: {*filter(None, map(str.strip, row["label"].split(";")))} for row in rows}


def test_the_run_says_how_well_each_label_is_found(films):
    manifest = json.loads((films / "run" / "manifest.json").read_text())
    evaluation = json.loads((films / "run" / "evaluation.json").read_text())
    assert manifest["multi_label"] is True and evaluation["calibration"] == {}
    assert list(evaluation["by_label"]) == list(FINDINGS) and "confusion" not in evaluation
    final = json.loads((films / "run" / "summary.json").read_text())["final"]
    for key in ("auroc", "average_precision"):
        means = np.mean([about[key] for about in evaluation["by_label"].values()])
        assert final[f"test_{key}"] == pytest.approx(means) and means > 0.8
    assert evaluation["tested"] == 18


def test_predict_prints_each_label_with_its_probability(films, here, fedlens):
    ended = fedlens("predict", films / "run", *films.glob("[0-9]*.png"), "-q")
    rows = list(csv.DictReader(io.StringIO(ended.out)))
    assert (ended.status, len(rows)) == (0, 90)
    ranks = [f"{word}_{k}" for k in (1, 2, 3) for word in ("class", "probability")]
    assert list(rows[0]) == ["path", "labels", *ranks]
    right = 0
    for row in rows:
        shares = {row[f"class_{k}"]: float(row[f"probability_{k}"]) for k in (1, 2, 3)}
        said = {*filter(None, row["labels"].split(";"))}
        assert shares.keys() == {*FINDINGS} and said == {k for k, p in shares.items() if p > 0.5}
        right += said == truth(films)[Path(row["path"]).name]
    assert right > 60 and any(row["labels"] == "" for row in rows)
    (low,) = json.loads(
        fedlens("predict", films / "run", films / "0.png", "--threshold", 1e-6, "--json").out
    )
    assert {*low["labels"]} == {*FINDINGS}


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("--threshold", 1.5), "--threshold is 1.5"),
        (("--abstain", 0.8), "--threshold"),
    ],
)
def test_what_predict_cannot_do_is_said_in_one_line(films, here, fedlens, arguments, word):
    ended = fedlens("predict", films / "run", films / "0.png", *arguments)
    assert (ended.status, ended.err.count("\n")) == (2, 1) and word in ended.err


def test_a_threshold_is_for_several_labels_alone(trained, here, fedlens):
    ended = fedlens("predict", trained.run, trained.images, "--threshold", 0.5, "-q")
    assert ended.status == 2 and "--threshold" in ended.err


def test_evaluate_measures_each_label_on_other_files(films, here, fedlens):
    ended = fedlens("evaluate", films / "run", "--data", films / "films.csv", "--json", "-q")
    found = json.loads(ended.out)
    assert found["images"] == 90 and found["trained_on"]["images"] == 72
    counts = [sum(name in some for some in truth(films).values()) for name in FINDINGS]
    assert [about["images"] for about in found["by_label"].values()] == counts
    answers = fl.load(films / "run").predict([films / name for name in truth(films)])
    said = [set(one.labels or ()) for one in answers]
    right = [one == some for one, some in zip(said, truth(films).values(), strict=True)]
    assert found["accuracy"] == pytest.approx(np.mean(right))
    shown = fedlens("evaluate", films / "run", "--data", films / "films.csv", "-q").out
    assert "AUROC" in shown and all(name in shown for name in FINDINGS)


def test_other_data_must_have_its_labels_and_say_that_there_are_several(films, here, fedlens):
    Path("other.csv").write_text(f"path,label\n{films / '0.png'},effusion;hernia\n")
    ended = fedlens("evaluate", films / "run", "--data", "other.csv")
    assert ended.status == 2 and "'hernia', which the model does not have" in ended.err
    ended = fedlens("evaluate", films / "run", "--data", films)
    assert ended.status == 2 and "no csv file" in ended.err


def test_an_exported_model_gives_sigmoids_and_says_so(films, here, fedlens):
    classifier = fl.load(films / "run")
    image = classifier.preprocessing.read(films / "0.png")[None]
    assert fedlens("export", films / "run", "--out", "m.pt", "-q").status == 0
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        found = torch.jit.load("m.pt")(image)
        torch.testing.assert_close(found, classifier(image).sigmoid())
    card = Path("m.pt.md").read_text()
    assert "sigmoids" in card and "| effusion |" in card and "may have several" in card
    assert fedlens("export", films / "run", "--out", "m.safetensors", "-q").status == 0
    with safe_open("m.safetensors", "pt") as file:
        assert json.loads(file.metadata()["probabilities"]) == "sigmoid"


def test_a_served_model_shows_all_labels(films):
    classifier = fl.load(films / "run")
    with serving_model(classifier, "films", "127.0.0.1", 0, top=1) as address:
        status, found = asked(address, (films / "1.png").read_bytes())
    (expected,) = classifier.predict([films / "1.png"])
    assert status == 200 and len(found["classes"]) == 3 and found["labels"] == expected.labels
    assert found["heat_map"].startswith("data:image/png")


def test_a_page_shows_a_table_of_labels(films, here, fedlens, quick_pages):
    ended = fedlens("report", films / "run", "--out", here / "page")
    page = (here / "page" / "report.html").read_text()
    assert ended.status == 0 and "average precision" in ended.out
    assert "Label by label" in page and "Confusion" not in page and ">chance" not in page


def test_an_audit_is_refused(films, fedlens, monkeypatch):
    monkeypatch.chdir(films)
    ended = fedlens("privacy", "audit", "films.toml", "--shadows", 4)
    assert ended.status == 2 and "one class each" in ended.err


def test_partition_counts_images_and_not_labels(films, fedlens, monkeypatch, quick_pages):
    monkeypatch.chdir(films)
    told = json.loads(fedlens("partition", "films.toml", "--json").out)
    assert told["sizes"] == [24, 24, 24]
    assert all(sum(row) != 24 for row in told["label_counts"])
    assert "24" in fedlens("partition", "films.toml").out
