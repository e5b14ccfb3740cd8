"""What users should know before a run begins is told in a line."""

import logging
from dataclasses import replace

import pytest
from torch import nn

import fedlens as fl

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
