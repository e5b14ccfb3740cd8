"""The points of a sweep: how they are called, and which make no sense."""

from typing import Any

import numpy as np
import pytest
from torch import nn

import fedlens as fl
from fedlens.runs.grid import combinations
from tests.toys import toy

DATASET = toy(96, 6)


def base(**changes: Any) -> fl.Experiment:
    described: dict[str, Any] = {"dataset": DATASET, "model": "linear", "rounds": 3}
    return fl.Experiment(**described | changes)


def test_points_are_called_by_what_differs():
    axes: dict[str, list[Any]] = {
        "local.lr": [0.1, 1],
        "server.lr": [1.0],
        "model": ["linear", {"name": "a b"}],
    }
    assert list(combinations(axes, None, 0)) == [
        "local.lr=0.1,server.lr=1.0,model=linear",
        "local.lr=0.1,server.lr=1.0,model=a-b",
        "local.lr=1,server.lr=1.0,model=linear",
        "local.lr=1,server.lr=1.0,model=a-b",
    ]
    made = combinations({"algorithm.fedprox.mu": [0.1]}, 2, 5)
    assert made == {
        "mu=0.1,seed=5": ["algorithm.fedprox.mu=0.1", "seed=5"],
        "mu=0.1,seed=6": ["algorithm.fedprox.mu=0.1", "seed=6"],
    }


@pytest.mark.parametrize(
    ("axes", "seeds", "message"),
    [
        ({}, None, "a sweep needs values to go through: give a grid"),
        ({"local.lr": [0.1, 0.1]}, None, "two points of the sweep are called lr=0.1"),
        ({"local.lr": [0.1]}, 0, "seeds is 0: choose 1 or more"),
        ({}, "two", "seeds is 'two': give how many, or a grid of seed"),
        ({}, 2.0, "seeds is 2.0: give how many, or a grid of seed"),
        ({"seed": [1, 2]}, 2, "both a number of seeds and a grid of seed are given: leave one out"),
        ({"local.lr": []}, None, "local.lr has no values: give at least one"),
        ({"local.lrr": [1]}, None, "unknown key 'local.lrr': did you mean 'lr'?"),
    ],
)
def test_a_grid_that_makes_no_sense_is_refused(axes, seeds, message):
    with pytest.raises(ValueError, match=message.replace("?", r"\?")):
        fl.grid(base(), axes, seeds)


def test_values_of_a_grid_may_be_numpys():
    plain = fl.grid(base(), {"local.lr": [0.25, 0.5], "seed": [3], "clients.count": [2, 3]})
    axes: dict[str, Any] = {
        "local.lr": np.array([0.25, 0.5]),
        "seed": [np.int64(3)],
        "clients.count": np.arange(2, 4),
    }
    assert fl.grid(base(), axes) == plain
    assert list(fl.grid(base(), {}, seeds=np.int64(2))) == ["seed=0", "seed=1"]  # type: ignore[arg-type]


def test_a_grid_keeps_what_was_given_from_python():
    points = fl.grid(
        base(model=nn.Sequential(nn.Flatten(), nn.Linear(36, 3))), {"local.lr": [0.1, 0.2]}
    )
    assert all(point.dataset is DATASET for point in points.values())
    named = fl.grid(
        base(model=nn.Sequential(nn.Flatten(), nn.Linear(36, 3))), {"model": ["linear"]}
    )["model=linear"]
    assert named.model == fl.Named("linear")


def test_a_minus_sign_stays_in_the_name_of_a_point() -> None:
    named = combinations({"x.slope": [-1, 1, -0.5], "y": ["-a b-"]}, None, 0)
    assert list(named) == ["slope=-1,y=-a-b-", "slope=1,y=-a-b-", "slope=-0.5,y=-a-b-"]
