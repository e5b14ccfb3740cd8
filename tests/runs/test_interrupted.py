"""Runs that are interrupted before their first round is done."""

import json

import pytest
import torch
from torch import nn

import fedlens as fl
from fedlens.run_files import last_saved
from fedlens.runs.active import run_to_end
from fedlens.runs.run import start
from fedlens.setup import build
from tests.runs.resumable import assert_same_run, forgetful


class Interrupted(nn.Sequential):
    """A model on which somebody presses Ctrl-C in its first step of training."""

    armed = False

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if self.training and Interrupted.armed:
            raise KeyboardInterrupt
        logits: torch.Tensor = super().forward(images)
        return logits


@pytest.mark.parametrize("algorithm", ["fedavg", "admm", "fedadmm", "scaffold"])
def test_a_run_can_be_interrupted_in_its_first_round(tmp_path, algorithm, monkeypatch):
    """What the server tells may still lie where its model does: both are saved."""
    model = Interrupted(nn.Flatten(), nn.Linear(16, 3))
    experiment = forgetful(model=model, algorithm=algorithm)
    run = tmp_path / "run"
    fl.run(experiment, tmp_path / "whole")
    setup = build(experiment)  # which tries the model
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Interrupted, "armed", True)
        run_to_end([start(experiment, setup, run)])
    assert json.loads((run / "summary.json").read_text())["status"] == "interrupted"
    assert last_saved(run) == 0
    fl.resume(run, experiment=experiment)
    assert_same_run(run, tmp_path / "whole")
