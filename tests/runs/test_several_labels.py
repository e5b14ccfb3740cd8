"""Runs on images with several labels: alike on every engine, resumed, and with all comparisons."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import fedlens as fl
from fedlens.data.augment import Augment
from tests.films import corners, described
from tests.runs.resumable import Stop, assert_same_run

pytestmark = pytest.mark.usefixtures("one_thread", "quick_pages")


@pytest.mark.parametrize("engine", ["stacked", "processes"])
@pytest.mark.parametrize(
    "changes", [{}, {"algorithm": "scaffold"}, {"augment": Augment(mixup=0.5)}]
)
def test_engines_agree(engine, changes):
    given = described(precision="fp64", **changes)
    ours, theirs = fl.run(given), fl.run(replace(given, engine=engine))
    for name, value in ours.model.items():
        torch.testing.assert_close(theirs.model[name], value, rtol=1e-9, atol=1e-12)
    keys = [key for key in ours.final if not key.endswith("loss")]
    assert {k: theirs.final[k] for k in keys} == {k: ours.final[k] for k in keys}


def test_it_learns_each_label_by_itself():
    result = fl.run(described(rounds=15))
    assert result.final["test_auroc"] > 0.99 and result.final["test_average_precision"] > 0.99
    assert result.final["test_accuracy"] > 0.9 < result.final["client_accuracy_mean"]
    assert "test_top5" not in result.final


def test_one_round_is_a_step_that_can_be_worked_out_by_hand():
    """One client, one batch of all examples, weights of zero: p is 1/2 everywhere."""
    data = corners()
    local = fl.LocalTraining(batch_size=1000, lr=0.5)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
    for p in model.parameters():
        nn.init.zeros_(p)
    given = described(clients=fl.Clients(count=1), local=local, rounds=1)
    result = fl.run(replace(given, dataset=data, model=model))
    x = ((data.train.images.double() / 255 - 0.3) / 0.3).flatten(1)
    wanted = data.train.wanted(slice(None), 3).double()
    slope = (0.5 - wanted).T @ x / len(x) / 3
    found = result.model["1.weight"].double()
    torch.testing.assert_close(found, -0.5 * slope, rtol=1e-4, atol=1e-6)


def test_a_run_stopped_and_resumed_equals_one_that_was_not(tmp_path):
    given = described(rounds=4)
    fl.run(given, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        fl.run(given, tmp_path / "run", watch=Stop(2))
    fl.resume(tmp_path / "run", experiment=given)
    assert_same_run(tmp_path / "run", tmp_path / "whole")


def test_a_twin_clients_alone_and_intervals_are_measured_too():
    evaluate = fl.Evaluate(twin=True, local_only=True, fine_tune=1, bootstrap=20)
    result = fl.run(described(evaluate=evaluate))
    assert result.final["relative_accuracy"] > 0
    low, high = result.summary["intervals"]["test_auroc"]
    assert low <= result.final["test_auroc"] <= high


def test_a_metric_of_ones_own_gets_rows_of_0_and_1(monkeypatch, tmp_path):
    (tmp_path / "hamming_of.py").write_text(
        "def hamming(logits, labels):\n    return ((logits > 0) != labels).double().mean()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    result = fl.run(described(evaluate=fl.Evaluate(metrics=["hamming_of:hamming"])))
    assert 0 <= result.final["test_hamming"] <= 1


def test_runs_are_compared_by_average_precision(tmp_path):
    runs = {}
    for lr in (0.3, 0.001):
        local = fl.LocalTraining(batch_size=4, lr=lr)
        runs[f"lr {lr}"] = [tmp_path / f"{lr}-{seed}" for seed in (0, 1)]
        for seed, folder in enumerate(runs[f"lr {lr}"]):
            fl.run(described(local=local, seed=seed), folder)
    found = fl.compare(runs, out=tmp_path / "page")
    assert "lr 0.3 " in found.summary and "average precision" in found.summary
