"""A fleet whose sites have images with several labels."""

import csv
from typing import Any

import numpy as np
import pytest
from PIL import Image

import fedlens as fl
from fedlens.fleet.site_data import check_files, identity, num_examples, site_examples
from fedlens.fleet.terms import for_fleet
from tests.films import LOSS, corners
from tests.fleet.sites import make_sites, model_bytes, run_nearby, terms_of

EXPERIMENT = f"""
dataset = {{ name = "npz", path = "data.npz" }}
model = "linear"
loss = "{LOSS}"
rounds = 2
engine = "processes"
clients = {{ count = 3, holdout = 0.25 }}
local = {{ batch_size = 8 }}
"""


@pytest.fixture
def experiment(tmp_path):
    data = corners()
    arrays = {}
    for name, part in (("train", data.train), ("test", data.test)):
        arrays[f"x_{name}"] = part.images[:, 0].numpy()
        arrays[f"y_{name}"] = part.wanted(slice(None), 3).numpy()
    save: Any = np.savez
    save(tmp_path / "data.npz", **arrays, classes=np.array(data.classes))
    path = tmp_path / "experiment.toml"
    path.write_text(EXPERIMENT)
    return path


def test_a_fleet_gets_the_model_of_a_simulation(experiment, tmp_path):
    sites = make_sites(experiment, tmp_path / "sites")
    found = run_nearby(experiment, tmp_path / "fleet", sites)
    expected = fl.run(fl.Experiment.read(experiment), tmp_path / "simulated")
    assert model_bytes(tmp_path / "fleet") == model_bytes(tmp_path / "simulated")
    for key in ("test_auroc", "client_accuracy_mean"):
        assert found.final[key] == expected.final[key]


def test_a_site_lists_its_images_in_a_csv_file_with_classes_in_any_order(experiment, tmp_path):
    terms = terms_of(for_fleet(fl.Experiment.read(experiment)), [])
    rows = [("0.png", "c; a"), ("1.png", ""), ("2.png", "b"), ("3.png", "b|c")]
    with (tmp_path / "site.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("path", "label"), *rows])
    for name, _ in rows:
        Image.fromarray(np.zeros((8, 8), np.uint8)).save(tmp_path / name)
    check_files(tmp_path / "site.csv", tmp_path)
    assert num_examples(tmp_path / "site.csv") == 4 and identity(tmp_path / "site.csv")
    for cache in (None, tmp_path / "cache"):
        examples = site_examples(tmp_path / "site.csv", terms, cache)
        wanted = examples.wanted(slice(None), 3).tolist()
        assert wanted == [[1, 0, 1], [0, 0, 0], [0, 1, 0], [0, 1, 1]]


def test_a_site_with_one_class_an_image_is_refused(experiment, tmp_path):
    terms = terms_of(for_fleet(fl.Experiment.read(experiment)), [])
    images = np.zeros((2, 8, 8), np.uint8)
    np.savez(tmp_path / "site.npz", x_train=images, y_train=np.array([0, 2]))
    with pytest.raises(ValueError, match="may have several labels"):
        site_examples(tmp_path / "site.npz", terms, None)
    rows = np.array([[0, 1], [1, 1]])
    np.savez(tmp_path / "site.npz", x_train=images, y_train=rows, classes=np.array(["a"]))
    with pytest.raises(ValueError, match="name all"):
        site_examples(tmp_path / "site.npz", terms, None)
    np.savez(tmp_path / "site.npz", x_train=images, y_train=rows, classes=np.array(["a", "z"]))
    with pytest.raises(ValueError, match="'z', which the experiment does not have"):
        site_examples(tmp_path / "site.npz", terms, None)


def test_the_model_that_stays_at_a_site_knows_that_there_are_several(experiment, tmp_path):
    sites = make_sites(experiment, tmp_path / "sites")
    run_nearby(experiment, tmp_path / "fleet", sites)
    (kept,) = (sites[0].home / "models").iterdir()
    assert fl.load(kept).multi_label and not fl.load(kept).training
