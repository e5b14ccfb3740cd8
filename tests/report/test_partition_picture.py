from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import fedlens as fl
from fedlens.report.partition import draw, title_of


def names(num_classes: int) -> list[str]:
    return [f"class {label}" for label in range(num_classes)]


def some_counts(num_clients: int, num_classes: int) -> np.ndarray[Any, Any]:
    rng = np.random.default_rng(0)
    return rng.multinomial(200, rng.dirichlet([0.1] * num_classes, num_clients))


def pixels(path: Path) -> np.ndarray[Any, Any]:
    with Image.open(path) as image:
        assert image.format == "PNG"
        return np.asarray(image.convert("RGB"))


@pytest.mark.parametrize(
    ("num_clients", "num_classes"),
    [(1, 1), (1, 10), (10, 10), (61, 10), (2500, 10), (10, 100), (100, 100)],
)
def test_every_partition_has_a_picture(tmp_path: Path, num_clients: int, num_classes: int) -> None:
    path = tmp_path / "pictures" / "partition.png"
    drawn = draw(some_counts(num_clients, num_classes), names(num_classes), "any", path)
    assert drawn == path
    assert [file.name for file in path.parent.iterdir()] == ["partition.png"]
    image = pixels(path)
    assert image.shape[1] == 1008 and 400 < image.shape[0] < 1600
    assert len(np.unique(image[..., 0])) > 20


@pytest.mark.parametrize("num_clients", [10, 100])
def test_another_partition_is_another_picture(tmp_path: Path, num_clients: int) -> None:
    counts = some_counts(num_clients, 10)
    first = pixels(draw(counts, names(10), "t", tmp_path / "1.png"))
    again = pixels(draw(counts, names(10), "t", tmp_path / "2.png"))
    other = pixels(draw(counts[:, ::-1], names(10), "t", tmp_path / "3.png"))
    assert (first == again).all()
    assert (first != other).any(2).mean() > 0.01  # not a label alone


@pytest.mark.parametrize("num_clients", [3, 70])
def test_empty_clients_and_odd_names_do_no_harm(tmp_path: Path, num_clients: int) -> None:
    counts = np.zeros((num_clients, 2), dtype=np.int64)
    odd = ["$x^", "a name that is much too long to be shown"]
    image = pixels(draw(counts, odd, "$\\frac{", tmp_path / "a.png"))
    assert len(np.unique(image[..., 0])) > 20  # it is neither blank nor black


def test_pyplot_is_never_imported() -> None:
    program = "import sys, fedlens.report.partition; assert 'matplotlib.pyplot' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize(
    ("partition", "title"),
    [
        ({"name": "dirichlet", "alpha": 0.1}, "cifar10: dirichlet alpha=0.1"),
        ({"name": "proportions", "sizes": "low"}, "cifar10: proportions sizes=low"),
        ({"name": "published", "path": "/a/b/c.csv.gz"}, "cifar10: published path=c.csv.gz"),
        ({"name": "fresh", "per_class": 5}, "cifar10: fresh per_class=5, in round 1"),
        ({"name": "drawn", "per_class": 5}, "cifar10: drawn per_class=5"),
        (
            {"name": "noisy-labels", "high": 0.4, "of": {"name": "natural", "column": "writer"}},
            "cifar10: noisy-labels of natural column=writer high=0.4",
        ),
    ],
)
def test_a_title_has_the_options_that_matter(partition: dict[str, Any], title: str) -> None:
    content = {"dataset": "cifar10", "model": "linear", "rounds": 1}
    described = fl.Experiment.of(content | {"clients": {"partition": partition}})
    assert title_of("cifar10", described.clients.partition) == title


def test_a_few_clients_are_called_by_their_names(tmp_path: Path) -> None:
    counts = some_counts(5, 10)
    numbers = pixels(draw(counts, names(10), "t", tmp_path / "1.png"))
    called = pixels(draw(counts, names(10), "t", tmp_path / "2.png", ["ann", "b$", "c", "d", "e"]))
    assert called.shape != numbers.shape or (called != numbers).any()
