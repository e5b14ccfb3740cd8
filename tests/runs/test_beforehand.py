"""What users should know before a run begins is told in a line."""

import logging
from dataclasses import replace

import pytest
from torch import nn

import fedlens as fl
from fedlens.storage import free_memory

TWICE = "the model ends in Softmax"


def ending(*last):
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 10), *last)


def described(module, **changes):
    return replace(
        fl.Experiment(
            dataset="fashion-mnist-mini",
            model=module,
            rounds=1,
            engine="sequential",
            clients=fl.Clients(count=20, per_round=2),
        ),
        **changes,
    )


def told(experiment, caplog):
    with caplog.at_level(logging.WARNING):
        fl.run(experiment)
    return [line for line in caplog.messages if line.startswith(TWICE)]


def test_a_softmax_before_that_of_the_loss_is_told_of(caplog):
    (line,) = told(described(ending(nn.Softmax(dim=1))), caplog)
    assert line.endswith("leave out the model's")


@pytest.mark.parametrize("last", [(), (nn.LogSoftmax(dim=1),)])
def test_logits_and_their_logarithms_are_what_the_loss_takes(last, caplog):
    assert not told(described(ending(*last)), caplog)


def test_another_loss_may_want_probabilities(caplog):
    assert not told(described(ending(nn.Softmax(dim=1)), loss="double_softmax"), caplog)


@pytest.mark.parametrize(("algorithm", "fits"), [("ditto", False), ("fedper", True)])
def test_what_clients_come_to_remember_is_told_of_if_it_finds_no_room(
    algorithm, fits, caplog, monkeypatch
):
    """Of 8 MB a client of ditto remembers all, and one of fedper the head."""
    monkeypatch.setattr(free_memory, "available", lambda: 80_000_000)
    hidden = (nn.Flatten(), nn.Linear(784, 2500), nn.ReLU(), nn.Linear(2500, 10))
    clients = fl.Clients(count=20, per_round=2, holdout=0.1)
    local = fl.LocalTraining(steps=1)
    asked = described(nn.Sequential(*hidden), algorithm=algorithm, clients=clients, local=local)
    with caplog.at_level(logging.WARNING):
        fl.run(replace(asked, rounds=2, evaluate=fl.Evaluate(baselines=False)))
    lines = [line for line in caplog.messages if "remember" in line]
    assert lines == [] if fits else "11.8 MB go to files" in lines[0]
