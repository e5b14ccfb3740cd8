"""A small model of three sites, trained once for all tests of this folder."""

from pathlib import Path
from typing import NamedTuple

import pytest
from torch import nn

import fedlens as fl
from tests.sites import write_sites


class Trained(NamedTuple):
    images: Path
    run: Path


def small_cnn(shape, num_classes):
    """Convolution, normalisation, dropout, and a view of the batch as rows."""
    return nn.Sequential(
        nn.Conv2d(shape[0], 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Dropout(0.2),
        nn.Flatten(),
        nn.Linear(64, num_classes),
    )


@pytest.fixture(scope="session")
def trained(tmp_path_factory) -> Trained:
    place = tmp_path_factory.mktemp("trained")
    images = write_sites(place / "hospitals")
    experiment = fl.Experiment(
        dataset={"name": "folder", "path": str(images), "layout": "site/class", "size": 24},
        model="tests.deploy.conftest:small_cnn",
        rounds=3,
        engine="sequential",
        local=fl.LocalTraining(batch_size=8, lr=0.2),
    )
    fl.run(experiment, place / "run")
    return Trained(images, place / "run")
