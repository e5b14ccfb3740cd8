"""Runs that are interrupted before their first round is done."""

import json
import re

import pytest
import torch
from torch import nn

import fedlens as fl
from fedlens.runs.loop import run_to_end
from fedlens.runs.run import start
from fedlens.setup import build
from fedlens.storage.run_files import last_saved
from tests.runs.resumable import Stop, assert_same_run, forgetful


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


@pytest.mark.parametrize("rounds", [2, 3])
def test_an_interrupted_run_can_be_ended_soon(tmp_path, rounds):
    """As if it had been begun with so many rounds; then it has a model, too."""
    experiment, run = forgetful(rounds=9), tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        fl.run(experiment, run, watch=Stop(2))
    soon = f"finish it with fedlens resume {run}, or end it soon by --rounds 3"
    with pytest.raises(ValueError, match=re.escape(soon)):
        fl.load(run)
    with pytest.raises(ValueError, match="2 rounds"):
        fl.resume(run, rounds=1, experiment=experiment)
    result = fl.resume(run, rounds=rounds, experiment=experiment)
    fl.run(forgetful(rounds=rounds), tmp_path / "whole")
    assert_same_run(run, tmp_path / "whole")
    details = [(folder / "evaluation.json").read_text() for folder in (run, tmp_path / "whole")]
    assert details[0] == details[1]
    assert result.status == "finished"

    again = fl.resume(run, experiment=forgetful(rounds=rounds))  # nothing is left to do
    assert len(again.records) == rounds
    assert len(fl.resume(run, rounds=4, experiment=experiment).records) == 4


def test_a_run_ends_with_a_round_that_is_evaluated(tmp_path):
    experiment, run = forgetful(rounds=9, evaluate=fl.Evaluate(every=4)), tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        fl.run(experiment, run, watch=Stop(2))
    told = "has done 2 rounds, the last of which was not evaluated: ask for 3 or more"
    for rounds in (1, 2):
        with pytest.raises(ValueError, match=told):
            fl.resume(run, rounds=rounds, experiment=experiment)
    assert "test_accuracy" in fl.resume(run, rounds=3, experiment=experiment).records[-1]
