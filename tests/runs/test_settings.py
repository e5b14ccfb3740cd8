"""What an experiment asks of torch as a whole."""

from typing import Any

import torch

import fedlens as fl
from tests.toys import toy


def described(**changes: Any) -> fl.Experiment:
    clients = fl.Clients(count=4, per_round=2)
    return fl.Experiment(toy(), fl.Named("linear"), rounds=1, clients=clients, **changes)


def test_what_a_run_asks_of_torch_is_put_back(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    seen = []

    def look(_record: object) -> None:
        precise = torch.get_float32_matmul_precision()
        seen.append((precise, torch.are_deterministic_algorithms_enabled()))

    fl.run(described(precision="tf32", deterministic=True), watch=look)
    look(None)
    fl.run(described(), watch=look)
    assert seen == [("high", True), ("highest", False), ("highest", False)]
