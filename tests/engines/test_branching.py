"""Models whose forward pass branches on a tensor's value, which cannot be run for many clients."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedlens as fl
from fedlens.network.functional import MappedModel
from fedlens.setup import build
from tests.command_line import everything
from tests.toys import toy

BRANCHING = """
from torch import nn

class Branching(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)

    def forward(self, images):
        logits = self.linear(images.flatten(1))
        if logits.mean() > 0:
            logits = 2 * logits
        return logits

def branching(shape, num_classes):
    return Branching(shape[0] * shape[1] * shape[2], num_classes)
"""


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 3)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.linear(images.flatten(1))
        return 2 * logits if logits.mean() > 0 else logits


class Unread(nn.Module):
    """What cannot be read layer by layer, but mapped over clients."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 3)

    def forward(self, images: Tensor) -> Tensor:
        size = torch.tensor(images.shape).prod() // len(images)
        logits: Tensor = self.linear(images.reshape(len(images), int(size)))
        return logits


def described(model: nn.Module, **changes: Any) -> fl.Experiment:
    clients = fl.Clients(count=4)
    return fl.Experiment(dataset=toy(), model=model, rounds=1, clients=clients, **changes)


def test_one_line_names_the_engines_that_can_before_anything_is_written(here: Path, fedlens: Any):
    Path("odd_models.py").write_text(BRANCHING)
    before = everything()
    ended = fedlens("run", "a.toml", "model=odd_models:branching", "engine=stacked", "-q")
    assert ended.status == 2
    (line,) = ended.err.splitlines()
    assert line.startswith(
        "fedlens: engine stacked cannot train many clients of this model at once"
    )
    assert "(odd_models.py, line 11, in forward: " in line
    assert line.endswith('): choose engine = "sequential" or "processes"')
    assert "http" not in line
    left = {path: bytes for path, bytes in everything().items() if "__pycache__" not in path}
    assert left == before
    ended = fedlens("run", "a.toml", "model=odd_models:branching", "engine=sequential", "-q")
    assert ended.status == 0


def test_the_automatic_choice_falls_back_on_one_client_after_another_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("fedlens.setup.devices.automatic_engine", lambda *_: "stacked")
    with caplog.at_level(logging.WARNING):
        assert build(described(Branching())).engine.name == "sequential"
    (record,) = caplog.records
    assert "engine sequential trains one after another" in record.getMessage()


def test_a_model_that_is_mapped_over_clients_is_stacked() -> None:
    model = Unread()
    assert isinstance(build(described(model, engine="stacked")).network.stacked, MappedModel)
    expected = fl.run(described(model, engine="sequential")).model
    for name, found in fl.run(described(model, engine="stacked")).model.items():
        torch.testing.assert_close(found, expected[name])
