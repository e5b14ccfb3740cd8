"""The experiment that `fedlens import` writes, and its reasons."""

import re
import tomllib

import pytest

import fedlens as fl
from fedlens.evaluation.intervals import wilson
from tests.sites import write_sites

PLACES = {"north": 2, "south": 2}


def imported(fedlens, here, size, **options):
    from PIL import Image

    for site in PLACES:
        for label, count in (("benign", 8), ("malignant", 2)):
            place = here / "photos" / site / label
            place.mkdir(parents=True)
            for number in range(count):
                shade = 40 + 10 * number + (90 if label == "benign" else 0)
                Image.new("RGB", (size + 40, size), (shade, 80, 120)).save(place / f"{number}.png")
    ended = fedlens("import", "photos")
    assert ended.status == 0, ended.err
    return ended.out, (here / "photos.toml").read_text()


def test_large_photos_get_a_pretrained_head_and_each_choice_its_reason(here, fedlens, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(here / "cache"))
    told, text = imported(fedlens, here, 100)
    tables = tomllib.loads(text)
    assert (tables["model"], tables["weights"]) == ("efficientnet-lite0", "imagenet")
    assert (tables["norm"], tables["train"]) == ("frozen", "head")
    assert tables["evaluate"]["metrics"] == ["auroc"]
    assert tables["local"]["class_balance"] == 0.99
    for key in ("weights", "normalise", "norm", "train", "class_balance", "metrics"):
        assert re.search(rf"^{key} = .*  # .", text, re.MULTILINE), key
    expected = re.search(r"expect: tests on (\d+) of .* between (\S+) and (\S+)", told)
    assert expected is not None and 2 <= int(expected[1]) <= 6
    assert list(expected.groups()[1:]) == [f"{x:.0%}" for x in wilson(0.8, int(expected[1]))]
    result = fl.run(fl.Experiment.read(here / "photos.toml", overrides=["rounds=2"]))
    assert "test_auroc" in result.final
    assert sum(record["bytes_up"] for record in result.records) < 100_000  # of the head alone


def test_small_images_get_a_small_network(here, fedlens):
    told, text = imported(fedlens, here, 40)
    assert tomllib.loads(text)["model"] == "simple-cnn"
    assert "advice" not in told


def test_without_the_weights_the_experiment_runs_and_the_extra_is_named(here, fedlens, monkeypatch):
    monkeypatch.setattr("fedlens.models.weights.packaged", lambda _: None)
    told, text = imported(fedlens, here, 100)
    assert tomllib.loads(text)["model"] == "simple-cnn"
    assert "fedlens[pretrained]" in told


@pytest.mark.parametrize("count", [4])
def test_balanced_classes_count_alike(count, here, fedlens):
    write_sites(here / "h", count=count)
    assert fedlens("import", "h").status == 0
    assert "class_balance" not in (here / "h.toml").read_text()


@pytest.mark.parametrize(
    ("sizes", "fit"),
    [
        ([(50, 50), (60, 58)], None),
        ([(80, 60), (40, 30)], "stretch"),
        ([(80, 60), (60, 80)], "letterbox"),
    ],
)
def test_photos_of_several_shapes_keep_them(sizes, fit, here, fedlens):
    from PIL import Image

    for i in range(8):
        place = here / "photos" / ("a", "b")[i % 2]
        place.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", sizes[i // 2 % 2], (20 * i, 0, 0)).save(place / f"{i}.jpg")
    told = fedlens("import", "photos").out
    text = (here / "photos.toml").read_text()
    assert tomllib.loads(text)["dataset"].get("fit") == fit
    assert ("  # fit: " in text, "size and fit" in told) == (fit is not None, fit is not None)
    assert "fit" in fl.Experiment.read(here / "photos.toml").toml() or fit is None
