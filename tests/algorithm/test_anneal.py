"""A learning rate that falls in the course of a client's round."""

import math
from typing import Any

import pytest
import torch

import fedlens as fl
from fedlens.setup import build
from tests.toys import toy

EPOCH = {"name": "cosine", "end": 0.1}


def described(**changes: Any) -> fl.Experiment:
    plain: dict[str, Any] = {"dataset": toy(), "model": "linear", "rounds": 3}
    plain |= {"engine": "sequential", "precision": "fp64", "clients": {"count": 4, "per_round": 2}}
    local = {"steps": {"low": 2, "high": 5}, "batch_size": 5, "lr": 0.1, "anneal": EPOCH}
    return fl.Experiment(**plain | {"local": local | changes.pop("local", {})} | changes)


def by_hand(share: Any, optimizer: Any) -> dict[str, torch.Tensor]:
    """One client with all examples, in one round of full-batch steps, by torch.optim."""
    data = toy().train
    setup = build(central())
    module = setup.network.module.double()
    rule = optimizer(module.parameters())
    for step in range(4):
        rule.param_groups[0]["lr"] = 0.05 * share(step / 4)
        rule.zero_grad()
        torch.nn.functional.cross_entropy(module(data.images.double()), data.labels).backward()
        rule.step()
    return {name: p.detach() for name, p in module.named_parameters()}


def central(**local: Any) -> fl.Experiment:
    own = {"steps": 4, "batch_size": 48, "lr": 0.05, **local}
    return described(rounds=1, clients={"count": 1}, local=own)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_steps_are_those_of_pytorch_with_that_learning_rate(optimizer):
    shares = {
        "cosine": lambda over: 0.1 + 0.9 * (1 + math.cos(math.pi * over)) / 2,
        "linear": lambda over: 0.1 + 0.9 * (1 - over),
    }
    for name, share in shares.items():
        sgd = optimizer == "sgd"
        rule = (
            (lambda p: torch.optim.SGD(p, momentum=0.5))
            if sgd
            else (lambda p: torch.optim.AdamW(p, weight_decay=0.0))
        )
        own: dict[str, Any] = {"optimizer": optimizer, "momentum": 0.5 if sgd else 0.0}
        found = fl.run(central(anneal={"name": name, "end": 0.1}, **own)).model
        for key, value in by_hand(share, rule).items():
            torch.testing.assert_close(found[key], value, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("local", [{}, {"optimizer": "adam", "clip": 1.0}], ids=str)
def test_engines_agree(local):
    lr = {"name": "exponential", "start": 0.1, "decay": 0.5}
    expected = fl.run(described(local={"lr": lr, **local}))
    for engine in ("stacked", "processes"):
        found = fl.run(described(local={"lr": lr, **local}, engine=engine))
        for name, value in expected.model.items():
            torch.testing.assert_close(found.model[name], value, rtol=1e-9, atol=1e-11)


def test_ends_are_swept_side_by_side():
    points = fl.grid(described(engine="stacked"), {"local.anneal.end": [0.1, 1.0]})
    together = fl.sweep(points)
    for name, found in together.items():
        for key, value in fl.run(points[name]).model.items():
            torch.testing.assert_close(found.model[key], value, rtol=1e-9, atol=1e-11)
    plain = fl.run(described(engine="stacked", local={"anneal": None}))
    for key, value in plain.model.items():  # an end of 1 is no change at all
        torch.testing.assert_close(together["end=1.0"].model[key], value, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"local": {"anneal": "cosin"}}, "unknown anneal 'cosin': did you mean 'cosine'?"),
        ({"local": {"anneal": {"name": "linear", "end": -1}}}, "end is -1.0: choose 0 or more"),
        ({"algorithm": "scaffold"}, "scaffold"),
        ({"algorithm": "qfedavg", "local": {"steps": None}}, "qfedavg needs SGD"),
    ],
)
def test_what_cannot_be_annealed_is_refused_in_a_line(changes, message):
    with pytest.raises(ValueError, match=message) as caught:
        build(described(**changes))
    assert "\n" not in str(caught.value)
