"""What is measured, by name, and which way is better."""

import math

import pytest
import torch

import fedlens as fl
from fedlens.config.names import MEASURE_PREFIXES, RECORD_FIELDS
from fedlens.engines import Sequential
from fedlens.evaluation.measures import (
    HIGHER,
    LOWER,
    NEITHER,
    OF_MODEL,
    OF_PART,
    OVER_CLIENTS,
    SUCCESS,
    best,
)
from fedlens.evaluation.metrics import Tally, metrics, spread
from tests.toys import toy


def test_all_that_is_measured_of_answers_and_of_clients_is_declared():
    tally = Tally.of(torch.eye(3), torch.arange(3), 3)
    assert metrics(tally).keys() == set(OF_PART)
    found = spread(
        torch.tensor([0.5, torch.nan, 0.7], dtype=torch.float64), torch.tensor([1, 9, 3])
    )
    assert found.keys() == set(OVER_CLIENTS)
    assert found["weighted"] == pytest.approx((0.5 + 3 * 0.7) / 4)


def test_no_scalar_of_an_algorithm_can_be_called_as_a_measure_of_the_model_is():
    for name in OF_MODEL:
        assert name.startswith(MEASURE_PREFIXES), name


@pytest.mark.parametrize(
    "algorithm", ["fedavg", "admm", {"name": "fedprox", "inexactness": True}, "clip"]
)
def test_all_that_a_run_records_is_declared(algorithm, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    experiment = fl.Experiment(
        dataset=toy(),
        model="linear",
        rounds=2,
        engine="sequential",
        clients=fl.Clients(count=4, holdout=0.3),
        evaluate=fl.Evaluate(on=("test", "validation", "train"), twin=True),
        algorithm=algorithm,
    )
    result = fl.run(experiment)
    recorded = result.records[-1].keys()
    assert recorded <= LOWER | HIGHER | NEITHER | set(RECORD_FIELDS)
    assert recorded >= OF_MODEL.keys() - {SUCCESS}  # which an attack is measured by
    assert result.summary["final"].keys() == recorded - set(RECORD_FIELDS) | {"train_loss"}
    declared = (recorded & (LOWER | HIGHER)) - {"train_loss"}
    assert result.summary["best"].keys() == declared


def test_the_best_is_the_lowest_or_the_highest_and_the_first_of_equals():
    values = [(0.5, 1), (0.9, 2), (0.1, 3), (0.9, 4), (0.1, 5)]
    assert best("test_accuracy", values) == (0.9, 2)
    assert best("train_set_loss", values) == (0.1, 3)
    assert best("client_accuracy_std", values) == best("primal_residual", values) == (0.1, 3)
    assert best("test_accuracy", []) is None


@pytest.mark.parametrize("name", ["test_classes_predicted", "a_measure_of_my_own"])
def test_where_neither_way_is_better_there_is_no_best(name):
    assert best(name, [(1.0, 1), (math.pi, 2)]) is None


def test_the_record_of_a_round_says_how_many_workers_were_lost_in_it(monkeypatch):
    """Before and after each of three rounds; two are lost in the second."""
    lost = iter((0, 0, 0, 2, 2, 2))
    monkeypatch.setattr(Sequential, "num_lost", property(lambda _: next(lost)))
    experiment = fl.Experiment(
        dataset=toy(),
        model=fl.Named("linear"),
        rounds=3,
        device="cpu",
        engine="sequential",
        clients=fl.Clients(count=4, per_round=2),
    )
    records = fl.run(experiment).records
    assert [record.get("workers_lost") for record in records] == [None, 2, None]
