"""Engines that see steps one by one tell how many a client has taken."""

import itertools
from typing import Any

import pytest

import fedlens as fl
from fedlens.runs import loop
from fedlens.runs.progress import Watching


def told_within(num_clients: int, batch_size: int) -> list[Any]:
    """What a watch is told within the round of a run."""
    experiment = fl.Experiment(
        dataset="fashion-mnist-mini",
        model="linear",
        rounds=1,
        engine="sequential",
        clients=fl.Clients(count=num_clients),
        local=fl.LocalTraining(batch_size=batch_size),
    )
    within: list[Any] = []
    fl.run(experiment, watch=Watching(within.append))
    return within


def test_a_client_that_trains_long_tells_its_steps_and_the_share_of_the_round(monkeypatch):
    monkeypatch.setattr(loop, "TOLD_SECONDS", 0.0)
    within = told_within(num_clients=2, batch_size=1000)
    steps = [(one["stepped"], one["of"], one["share"]) for one in within if "stepped" in one]
    sixths = [pytest.approx(k / 6) for k in range(1, 7)]
    assert steps == [(k % 3 + 1, 3, sixths[k]) for k in range(6)]


def test_of_many_short_clients_their_number_is_told_and_not_their_steps(monkeypatch):
    monkeypatch.setattr(loop, "TOLD_SECONDS", 0.01)
    clock = itertools.count()
    monkeypatch.setattr("time.perf_counter", lambda: 0.002 * next(clock))
    told = [next(iter(record)) for record in told_within(num_clients=60, batch_size=50)]
    assert "trained" in told and "stepped" not in told
