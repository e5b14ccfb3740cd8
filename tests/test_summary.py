"""What a summary says of time and memory."""

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

import fedlens as fl
from fedlens.build import build
from fedlens.engines.processes import largest_yet
from fedlens.run import train
from fedlens.summary import peak_memory

EXPERIMENT = fl.Experiment(
    dataset="fashion-mnist-mini",
    model="linear",
    rounds=2,
    engine="sequential",
    clients=fl.Clients(count=30, per_round=2),
)


def test_a_resumed_run_remembers_how_long_its_earlier_parts_took(tmp_path):
    run = tmp_path / "run"
    spent = fl.run(EXPERIMENT, run).summary["seconds"]
    after = fl.resume(run, experiment=replace(EXPERIMENT, rounds=4)).summary["seconds"]
    written = [json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()]
    assert after["evaluation"] == pytest.approx(sum(r["evaluation_seconds"] for r in written))
    last = sum(r["seconds"] + r["evaluation_seconds"] for r in written[2:])
    assert after["total"] >= spent["total"] + last
    (run / "summary.json").unlink()  # a killed run's is of its start: then the records count
    again = fl.resume(run, experiment=replace(EXPERIMENT, rounds=4)).summary["seconds"]
    assert again["training"] == after["training"]
    assert again["total"] >= again["training"] + again["evaluation"]


class Greedy(nn.Module):
    """A net that takes 200 MB in training, and gives them back."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(784, 10)

    def forward(self, images):
        if self.training:
            torch.ones(50_000_000).sum()
        return self.layer(images.flatten(1))


def test_the_peak_of_memory_counts_the_workers(monkeypatch):
    """Two workers take 200 MB each, which the process that forked them never had."""
    monkeypatch.setattr("fedlens.build._try_training", lambda *_: None)
    monkeypatch.setattr("fedlens.engines.processes.num_cores", lambda: 2)
    setup = build(replace(EXPERIMENT, model=Greedy(), engine="processes", rounds=1))
    before = largest_yet()
    train(setup)
    own = largest_yet() - before
    assert own < 100e6
    assert 350e6 < setup.engine.worker_bytes < 600e6
    assert peak_memory(setup) == largest_yet() + setup.engine.worker_bytes
