"""The published runs of privacy cost what their papers, or later accountants, say."""

import pytest

from fedlens.privacy.accountant import epsilon, rdp
from fedlens.privacy.events import Release
from fedlens.recipes.dp.central import PUBLISHED

IMAGES = {"cifar10": 50_000, "fashion-mnist": 60_000, "mnist": 60_000}
COST = {  # by privacy loss distributions at δ = 1e-5
    ("cifar10", "z 1.16"): 1.97,
    ("cifar10", "z 0.807"): 4.20,
    ("cifar10", "z 0.715"): 5.84,
    ("cifar10", "z 0.61"): 9.45,
    ("cifar10", "z 0.559"): 12.51,
    ("cifar10", "z 0.498"): 18.36,
    ("mnist", "Opacus, z 0.7"): 5.43,
    ("mnist", "Opacus, z 1.1"): 2.30,
    ("mnist", "Opacus, z 1.3"): 0.83,
}
ACCURACY = {
    "cifar10": (0.585, 0.62, 0.637, 0.654, 0.662, 0.67, 0.775),
    "fashion-mnist": (0.86,),
    "mnist": (0.981, 0.9894, 0.9709, 0.9678, 0.9463),
}


def spent(dataset: str, cell: str) -> list[Release]:
    given = PUBLISHED[dataset][cell]
    rate = given["local"]["batch_size"] / IMAGES[dataset]
    count = given["rounds"] * given["local"]["steps"]
    return [Release(given["privacy"]["noise"], "poisson", rate, count=count)]


@pytest.mark.parametrize(("dataset", "cell"), COST)
def test_a_published_run_costs_what_is_printed(dataset, cell):
    assert f"{epsilon(spent(dataset, cell), 1e-5):.2f}" == f"{COST[dataset, cell]:.2f}"


def test_fashion_mnist_costs_what_rdp_says_today():
    (cell,) = PUBLISHED["fashion-mnist"]
    assert rdp(spent("fashion-mnist", cell), 1e-5) == pytest.approx(2.6, abs=0.05)


@pytest.mark.parametrize("dataset", ACCURACY)
def test_runs_are_measured_by_the_published_accuracies(dataset):
    found = tuple(given["accuracy"] for given in PUBLISHED[dataset].values())
    assert found == ACCURACY[dataset]
