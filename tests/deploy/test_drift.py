"""Images from elsewhere are told from images like those of training, by what the model sees."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from fedlens.deploy.drift import features_of, in_words, strangeness, stranger
from fedlens.deploy.testing import files_of
from tests.later import Later

oracle = Later("sklearn.metrics")


@pytest.mark.parametrize("seed", range(3))
def test_stranger_is_the_area_under_the_roc_curve(seed: int) -> None:
    rng = np.random.default_rng(seed)
    new, known = rng.integers(6, size=30), rng.integers(5, size=20)  # with ties
    share, interval = stranger(torch.from_numpy(new), torch.from_numpy(known))
    labels = np.repeat([1, 0], [30, 20])
    assert share == pytest.approx(oracle.roc_auc_score(labels, np.concatenate([new, known])))
    assert interval is not None and interval[0] < share < interval[1]


def test_the_interval_has_the_true_share_in_it_as_often_as_it_says() -> None:
    generator = torch.Generator().manual_seed(0)
    hits = 0
    for _ in range(400):  # N(1, 1) against N(0, 1): the share is the normal probability of 1 / √2
        new, known = torch.randn(2, 40, generator=generator).unbind()
        interval = stranger(new + 1, known)[1]
        assert interval is not None
        hits += interval[0] <= 0.76025 <= interval[1]
    assert 0.91 <= hits / 400 <= 0.98


def test_of_few_images_nothing_is_said() -> None:
    assert stranger(torch.ones(7), torch.zeros(100)) == (1.0, None)
    assert stranger(torch.ones(8), torch.zeros(8)) == (1.0, (1.0, 1.0))


def test_strangeness_is_the_distance_to_the_nearest_in_direction() -> None:
    trained_on = torch.tensor([[2.0, 0.0], [0.0, 5.0]])
    found = strangeness(
        torch.tensor([[7.0, 0.0], [1.0, 1.0], [-1.0, -1.0], [-3.0, 0.0]]), trained_on
    )
    half = np.sqrt(0.5)
    expected = [0, np.sqrt(2 - 2 * half), np.sqrt(2 + 2 * half), np.sqrt(2)]
    assert found.tolist() == pytest.approx(expected, abs=1e-7)


def test_features_are_what_the_last_linear_layer_is_given() -> None:
    module = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    images = torch.randn(5, 4)
    with features_of(module) as kept:
        module(images[:2])
        module(images[2:])
    assert torch.equal(torch.cat(kept), module[:2](images).detach())
    flat = nn.Sequential(nn.Conv2d(1, 2, 2), nn.Flatten())
    with features_of(flat) as kept:
        made = flat(torch.ones(1, 1, 2, 2))
    assert torch.equal(kept[0], made.detach())


def compared(fedlens: Any, *words: object) -> dict[str, Any]:
    ended = fedlens("evaluate", *words, "--json", "-q")
    assert ended.status == 0, ended.err
    found: dict[str, Any] = json.loads(ended.out)
    return found


def test_images_like_those_of_training_are_no_drift_and_noise_is(
    trained, here: Path, fedlens
) -> None:
    alike, noise = here / "alike", here / "noise"
    for number, file in enumerate(files_of(trained.run).test):
        for place, site in ((alike, "east"), (noise, f"site{number % 2}")):
            target = place / site / file.parent.name / f"{number}.png"
            target.parent.mkdir(parents=True, exist_ok=True)
            image = Image.open(file).convert("RGB")
            if place == noise and site == "site1":
                pixels = np.random.default_rng(number).integers(256, size=(24, 24, 3))
                image = Image.fromarray(pixels.astype(np.uint8))
            image.save(target)
    same = compared(fedlens, trained.run, "--data", alike)["drift"]
    assert same["stranger"] == pytest.approx(0.5, abs=0.05)
    assert same["interval"][0] < 0.5 and "look like those" in in_words(same)
    assert "by_client" not in same  # one site
    found = compared(fedlens, trained.run, "--data", noise)
    other = found["drift"]
    assert other["interval"][0] > 0.5 and "look different" in in_words(other)
    assert other["by_client"]["site1"]["stranger"] > 0.9
    assert other["by_client"]["site0"]["stranger"] < 0.7
    assert in_words(other).endswith(" site1 differs most.")
    assert other["images"] == found["images"] == len(other["distances"])

    shutil.rmtree(here / "page", ignore_errors=True)
    ended = fedlens("evaluate", trained.run, "--data", noise, "--unlabelled", "--out", "page", "-q")
    assert ended.status == 0 and "accuracy" not in ended.out
    assert "page: page/report.html" in ended.out and "look different" in ended.out
    page = Path("page/report.html").read_text()
    assert "How strange the images are" in page and "site1" in page
    assert "exists" in fedlens("evaluate", trained.run, "--data", noise, "--out", "page").err


def test_images_that_were_trained_on_are_not_compared(trained, here: Path, fedlens) -> None:
    some = here / "some"
    for number, file in enumerate(files_of(trained.run).train[:10]):
        target = some / file.parent.name / f"{number}.jpg"
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, target)
    assert "drift" not in compared(fedlens, trained.run, "--data", some)
    ended = fedlens("evaluate", trained.run, "--data", some, "--unlabelled")
    assert (ended.status, ended.out) == (2, "") and "cannot be compared" in ended.err
    ended = fedlens("evaluate", trained.run, "--data", here / "none", "--unlabelled")
    assert ended.status == 2 and "none" in ended.err
