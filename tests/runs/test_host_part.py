"""What is asked of a run before it begins is asked on the host: a GPU holds what is evaluated.

No test here has a GPU. `meta` tensors take the place of what would lie on one: they have a device
and no numbers, so that whoever mixes them with others, or reads them, fails.
"""

import logging
from dataclasses import replace

import torch

import fedlens as fl
from fedlens.runs.manifest import manifest
from fedlens.runs.run import say_beforehand
from fedlens.setup import build


def elsewhere(experiment):
    """A setup whose evaluated examples lie on another device than the host."""
    made = build(experiment)
    device = torch.device("meta")
    return replace(made, parts={name: part.to(device) for name, part in made.parts.items()})


PLAIN = fl.Experiment(
    dataset="fashion-mnist-mini",
    model="linear",
    rounds=2,
    engine="stacked",
    device="cpu",
    clients=fl.Clients(count=20, per_round=4),
    local=fl.LocalTraining(epochs=3),
    algorithm="fedvc",
)


def test_what_is_said_beforehand_is_found_on_the_host(caplog):
    with caplog.at_level(logging.WARNING):
        say_beforehand([elsewhere(PLAIN)])
    (line,) = caplog.messages
    assert line.startswith("local.epochs is 3, which has no effect")


def test_a_manifest_is_written_on_the_host():
    assert manifest(elsewhere(PLAIN))["data"] == build(PLAIN).dataset.digest
