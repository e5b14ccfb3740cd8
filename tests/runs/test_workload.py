"""How much work a round is, before it is run."""

from typing import Any

import pytest

import fedlens as fl
from fedlens.runs.points import num_evaluations


@pytest.mark.parametrize(
    "evaluate",
    [
        fl.Evaluate(),
        fl.Evaluate(every=7),
        fl.Evaluate(every=7, at=(1, 14, 20, 99), metrics=("ece",)),
        fl.Evaluate(every=100, at=(20,)),
    ],
    ids=str,
)
@pytest.mark.parametrize("rounds", [1, 20, 21])
def test_evaluations_are_counted_without_going_through_the_rounds(evaluate, rounds):
    due = [evaluate.is_due(round, rounds) for round in range(1, rounds + 1)]
    assert num_evaluations(evaluate, rounds) == sum(due)


def test_a_sweep_that_is_watched_may_have_metrics():
    seen: list[dict[str, Any]] = []
    described = fl.Experiment(
        dataset="fashion-mnist-mini",
        model="linear",
        rounds=1,
        clients=fl.Clients(count=2),
        evaluate=fl.Evaluate(metrics=("ece",)),
    )
    fl.sweep(fl.grid(described, {"local.lr": [0.01, 0.1]}), watch=seen.append)
    assert [record["done"] for record in seen] == [1, 2]
