"""What images are normalised by, before a model sees them."""

import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedlens as fl
from fedlens.fleet.terms import for_fleet
from fedlens.setup import build
from tests.fleet.sites import make_sites, model_bytes, run_nearby, write_experiment

IMAGENET = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]


def bytes_of_classes(channels: int = 3) -> fl.Dataset:
    drawn = torch.Generator().manual_seed(0)
    images = torch.randint(256, (24, channels, 4, 4), dtype=torch.uint8, generator=drawn)
    part = fl.Examples(images, torch.arange(24) % 3)
    return fl.Dataset("toy", part, part, tuple("abc"), (0.3,) * channels, (0.2,) * channels)


def described(dataset: fl.Dataset, normalise: Any) -> fl.Experiment:
    num_pixels = dataset.train.images[0].numel()
    model = nn.Sequential(nn.Flatten(), nn.Linear(num_pixels, 3))
    return fl.Experiment(
        dataset=dataset,
        model=model,
        rounds=1,
        engine="sequential",
        normalise=normalise,
        clients=fl.Clients(count=4),
    )


@pytest.mark.parametrize(
    ("normalise", "mean", "std"),
    [
        ("dataset", [0.3] * 3, [0.2] * 3),
        ("imagenet", *IMAGENET),
        ("none", [0.0] * 3, [1.0] * 3),
        ({"mean": 0.5, "deviation": [0.5, 0.25, 0.2]}, [0.5] * 3, [0.5, 0.25, 0.2]),
    ],
)
def test_a_model_sees_images_as_normalise_says(normalise, mean, std, tmp_path):
    dataset = bytes_of_classes()
    setup = build(described(dataset, normalise))
    seen = (dataset.test.images.float() / 255 - _column(mean)) / _column(std)
    expected = setup.network.module(seen)
    network = setup.network
    found = network.predict(network.params, network.buffers, dataset.test.images)
    torch.testing.assert_close(found, expected)

    fl.run(setup.experiment, tmp_path / "run")
    told = json.loads((tmp_path / "run" / "manifest.json").read_text())["images"]
    assert (told["mean"], told["std"]) == (mean, std), "predictions are made alike"


def _column(values: list[float]) -> Tensor:
    return torch.tensor(values).view(-1, 1, 1)


def test_points_of_a_sweep_may_be_normalised_differently():
    base = replace(described(bytes_of_classes(), "dataset"), model="linear", engine="stacked")
    points = {how: replace(base, normalise=how) for how in ("dataset", "none")}
    for how, result in fl.sweep(points).items():
        alone = fl.run(points[how])
        for name, tensor in alone.model.items():
            torch.testing.assert_close(result.model[name], tensor)


def test_images_that_cannot_be_normalised_so_are_refused():
    with pytest.raises(ValueError, match="ImageNet"):
        build(described(bytes_of_classes(channels=1), "imagenet"))
    whole = bytes_of_classes()
    floats = replace(whole.train, images=whole.train.images.float())
    with pytest.raises(ValueError, match="floats"):
        build(described(replace(whole, train=floats, test=floats), "none"))


def test_constants_that_fit_no_image_are_refused():
    for mean, deviation, key in (
        (0.5, 0.0, "deviation"),
        ([], 1.0, "mean"),
        (math.inf, 1.0, "mean"),
        ([0.5, 0.5], 1.0, "mean"),
    ):
        with pytest.raises(ValueError, match=f"normalise.{key}"):
            build(described(bytes_of_classes(), {"mean": mean, "deviation": deviation}))
    one = described(bytes_of_classes(), {"mean": 0.5, "deviation": [0.5, 0.5, 0.5]})
    assert fl.Experiment.of(replace(one, dataset="cifar10", model="linear").plain()) == replace(
        one, dataset="cifar10", model="linear"
    )


def test_sites_of_a_fleet_normalise_as_the_experiment_says(tmp_path):
    path = write_experiment(tmp_path)
    path.write_text(f'normalise = "none"\n{path.read_text()}')
    run_nearby(path, tmp_path / "fleet", make_sites(path, tmp_path / "sites"))
    fl.run(for_fleet(fl.Experiment.read(path)), tmp_path / "here")
    assert model_bytes(tmp_path / "fleet") == model_bytes(tmp_path / "here")
