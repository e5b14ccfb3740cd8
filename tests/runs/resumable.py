"""Small runs to stop and to resume, and what two runs must have in common to be the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fedlens as fl
from fedlens.runs.records import Record
from tests.toys import toy


def normed() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(1)
        layers = (nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten())
        return nn.Sequential(*layers, nn.Linear(8, 3))


def forgetful(**changes: Any) -> fl.Experiment:
    """FedAvg, which remembers nothing but the model."""
    plain: dict[str, Any] = {"dataset": toy(), "model": normed(), "rounds": 4}
    clients = fl.Clients(count=6, per_round=3, holdout=0.2)
    plain |= {"engine": "sequential", "clients": clients}
    return fl.Experiment(**plain | changes)


def mindful(**changes: Any) -> fl.Experiment:
    """Everything that can be remembered: by the server, by solvers, in layers of clients' own."""
    local = fl.LocalTraining(lr=0.05, momentum=0.9, reset=False, batch_size=4)
    return forgetful(algorithm="fedavgm", local=local, norm="local", **changes)


EACH = 244  # bytes that a client of `mindful` remembers


def set_room(monkeypatch: pytest.MonkeyPatch, num_clients: int) -> None:
    """Let memory have room for what the first clients remember: the others have files."""
    monkeypatch.setattr("fedlens.runs.loop.room_of_clients", lambda: num_clients * EACH)


def save_after_every_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedlens.runs.loop.CHECKPOINT_SECONDS", 0.0)
    monkeypatch.setattr("fedlens.runs.loop.SAVING_SHARE", 1.0)


def records(folder: Path) -> list[Record]:
    """What a run recorded, but for how long it took."""
    lines = map(json.loads, (folder / "rounds.jsonl").read_text().splitlines())
    return [{k: v for k, v in line.items() if not k.endswith("seconds")} for line in lines]


def assert_same_run(found: Path, expected: Path) -> None:
    assert records(found) == records(expected)
    models = [(folder / "model.safetensors").read_bytes() for folder in (found, expected)]
    assert models[0] == models[1]
    ours, theirs = (json.loads((f / "summary.json").read_text()) for f in (found, expected))
    told = ("status", "rounds", "final", "best", "emd", "bytes_up", "bytes_down")
    assert {key: ours[key] for key in told} == {key: theirs[key] for key in told}
    assert ours["seconds"]["total"] >= ours["seconds"]["training"]


class Stop:
    """A watch that raises something after some round."""

    def __init__(self, round: int, error: type[BaseException] = KeyboardInterrupt) -> None:
        self.round, self.error = round, error

    def __call__(self, record: Record) -> None:
        if record.get("round") == self.round:
            raise self.error


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
