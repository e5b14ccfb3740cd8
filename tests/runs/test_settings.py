"""What an experiment asks of torch as a whole."""

import os
from typing import Any

import pytest
import torch

import fedlens as fl
from tests.toys import toy


def described(**changes: Any) -> fl.Experiment:
    clients = fl.Clients(count=4, per_round=2)
    return fl.Experiment(toy(), fl.Named("linear"), rounds=1, clients=clients, **changes)


def test_what_a_run_asks_of_torch_is_put_back():
    seen = []

    def look(_record: object) -> None:
        precise = torch.get_float32_matmul_precision()
        seen.append((precise, torch.are_deterministic_algorithms_enabled()))

    fl.run(described(precision="tf32", deterministic=True), watch=look)
    look(None)
    fl.run(described(), watch=look)
    assert seen == [("high", True), ("highest", False), ("highest", False)]


@pytest.mark.parametrize("before", [None, ":16:8"])
def test_what_a_deterministic_run_asks_of_cublas_is_put_back(monkeypatch, before):
    if before is None:
        monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    else:
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", before)
    seen = []

    def look(_record: object) -> None:
        seen.append(os.environ.get("CUBLAS_WORKSPACE_CONFIG"))

    for deterministic in (False, True, False):
        fl.run(described(deterministic=deterministic), watch=look)
    assert seen == [before, before or ":4096:8", before]
    look(None)
    assert seen[-1] == before
