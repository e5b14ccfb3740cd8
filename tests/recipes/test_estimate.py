"""Estimates: of warm rounds, stacks as they train, evaluations included."""

from dataclasses import replace

import pytest

from fedlens.experiment import Clients, Evaluate, Experiment, LocalTraining, Named
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


def test_points_that_train_together_are_timed_together():
    points = {f"lr {lr}": replace(STACKED, local=LocalTraining(lr=lr)) for lr in (0.01, 0.1, 1.0)}
    points["fedavgm"] = replace(STACKED, algorithm=(Named("fedavgm"),))
    points["fedprox"] = replace(STACKED, algorithm=(Named("fedprox"),))
    timing = Timing(points.values())
    found = [one.names for one in timing.sweep(points)]
    assert found == [[point.name for point in stack] for stack in prepare(points).stacks]
    assert [len(names) for names in found] == [4, 1]
