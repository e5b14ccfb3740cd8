"""Estimates: of warm rounds, stacks as they train, evaluations included."""

from dataclasses import replace

import pytest

from fedlens.experiment import Clients, Evaluate, Experiment, LocalTraining, Named
from fedlens.recipes import estimate
from fedlens.recipes.estimate import Timing
from fedlens.runs.sweep import prepare

PLAIN = Experiment(
    dataset=Named("fashion-mnist-mini"),
    model=Named("linear"),
    rounds=20,
    engine="sequential",
    clients=Clients(count=20, per_round=4),
    local=LocalTraining(lr=0.05),
)
STACKED = replace(PLAIN, engine="stacked", device="cpu")


def seconds(timing, experiment):
    (found,) = timing.sweep({"one": experiment})
    return found.seconds


def test_an_estimate_grows_with_the_rounds():
    timing = Timing([PLAIN])
    seconds(timing, PLAIN)  # the first of a kind also counts what comes before it is warm
    once = seconds(timing, PLAIN)
    assert once > 0
    assert seconds(timing, replace(PLAIN, rounds=200)) == pytest.approx(10 * once)


def test_evaluations_count():
    timing = Timing([PLAIN])
    seconds(timing, PLAIN)
    often, seldom, at = (
        seconds(timing, replace(PLAIN, evaluate=evaluate))
        for evaluate in (Evaluate(), Evaluate(every=20), Evaluate(every=20, at=(1, 2, 30)))
    )
    cost = next(iter(timing.costs.values())).an_evaluation
    assert often - seldom == pytest.approx(19 * cost)
    assert at - seldom == pytest.approx(2 * cost)
    assert cost > 0


def test_what_is_set_apart_is_shortened_too(monkeypatch):
    monkeypatch.setattr(estimate, "TESTED", 50)
    described = replace(PLAIN, evaluate=Evaluate(on=("validation", "train")))
    assert seconds(Timing([described]), described) > 0


def test_points_that_train_together_are_timed_together():
    points = {f"lr {lr}": replace(STACKED, local=LocalTraining(lr=lr)) for lr in (0.01, 0.1, 1.0)}
    points["fedavgm"] = replace(STACKED, algorithm=(Named("fedavgm"),))
    points["fedprox"] = replace(STACKED, algorithm=(Named("fedprox"),))
    timing = Timing(points.values())
    found = [one.names for one in timing.sweep(points)]
    assert found == [[point.name for point in stack] for stack in prepare(points).stacks]
    assert [len(names) for names in found] == [4, 1]


@pytest.fixture
def as_if_ray(monkeypatch):
    """What is to run on Ray can be described where it is not installed."""
    monkeypatch.setattr("fedlens.engines.cluster.check", lambda: None)


@pytest.mark.usefixtures("as_if_ray")
@pytest.mark.parametrize(("workers", "expected"), [(1, 21.0), (2, 12.0), (3, 9.0), (9, 6.0)])
def test_points_that_are_spread_take_as_long_as_the_last_worker(workers, expected, monkeypatch):
    """Points of 1, 2, ... 6 s, in this order, each to the worker that is free first."""
    monkeypatch.setattr(estimate, "to_spread", lambda points: points)
    monkeypatch.setattr(estimate, "num_workers", lambda _: workers)
    monkeypatch.setattr(estimate, "_cost", lambda *_: estimate.Cost(0.0, 1.0, 0.0))
    ray = replace(PLAIN, engine="ray", device="cpu")
    points = {f"rounds {n}": replace(ray, rounds=n) for n in range(1, 7)}
    (found,) = Timing([ray]).sweep(points)
    assert found.names == [*points]
    assert found.seconds == pytest.approx(expected)


@pytest.mark.usefixtures("as_if_ray")
def test_a_point_that_is_spread_is_timed_on_one_worker(monkeypatch):
    """And on all of them one that is not spread, since it starts from a file of weights."""
    timed = []

    def seen(setups, work):
        timed.append(setups[0].engine._most_workers)
        return estimate.Cost(0.0, len(timed), 0.0)

    monkeypatch.setattr(estimate, "num_workers", lambda _: 2)
    monkeypatch.setattr(estimate, "_cost", seen)
    plain = replace(PLAIN, engine="ray", device="cpu", rounds=3)
    points = {f"seed {n}": replace(plain, seed=n) for n in range(4)}
    points["begun"] = replace(plain, weights="another/model.safetensors")
    begun, spread = Timing(points.values()).sweep(points)
    assert timed == [None, 1]
    assert begun == (["begun"], 3.0)
    assert spread == ([f"seed {n}" for n in range(4)], 2 * 3 * 2.0)
