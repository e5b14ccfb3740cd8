"""Algorithms and splits of one's own that fail: told in a line before anything is written."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import fedlens as fl
from fedlens.setup import build, partition

OWN = """
from dataclasses import dataclass, replace

import torch

from fedlens import Algorithm, paper
from fedlens.core import Upload
from fedlens.core.federation import Holdings
from fedlens.algorithm.pieces import Sgd
from fedlens.algorithm.slots import Combine


def pulled(local):
    sizes = [((p - local.anchor[n]) ** 2).flatten(1).sum(1) for n, p in local.params.items()]
    return torch.stack(sizes).sum(0)


@paper
def right(base: Algorithm, mu: float = 0.1) -> Algorithm:
    return replace(base, objective=base.objective.plus(lambda local: mu * pulled(local)))


@paper
def one_number(base: Algorithm) -> Algorithm:
    return replace(base, objective=base.objective.plus(lambda local: pulled(local).sum()))


@paper
def misspelled(base: Algorithm) -> Algorithm:
    return replace(base, objective=base.objective.plus(lambda local: local.parms))


def sends(**more):
    def upload(local):
        update = {n: local.params[n] - local.anchor[n] for n in local.params}
        return Upload(update=update, **more)

    return upload


@paper
def a_dict(base: Algorithm) -> Algorithm:
    return replace(base, upload=lambda local: {"update": local.params})


def named(base, name):
    def upload(local):
        return sends(scalars={name: torch.zeros(len(local.facts.size))})(local)

    return replace(base, upload=upload)


@paper
def named_as_ours(base: Algorithm) -> Algorithm:
    return named(base, "train_loss")


@paper
def named_as_a_measure(base: Algorithm) -> Algorithm:
    return named(base, "test_drift")


@paper
def named_as_a_setting(base: Algorithm) -> Algorithm:
    return named(base, "server.drift")


@paper
def measured_as_ours(base: Algorithm) -> Algorithm:
    return replace(base, measures=(lambda before, after: {"test_accuracy": torch.ones(())},))


@dataclass(frozen=True)
class Silent(Sgd):
    def update(self, grads, memory, params, local=None):
        super().update(grads, memory, params, local)


@paper
def silent(base: Algorithm) -> Algorithm:
    return replace(base, advance=Silent(1.0))


@paper
def drawing(base: Algorithm) -> Algorithm:
    return replace(base, objective=base.objective.plus(lambda l: pulled(l) * torch.rand(())))


def combine(updates, shares, cohort, layout):
    assert len(shares) > 9
    return {name: (u * shares.view(-1, *[1] * (u.ndim - 1))).sum(0) for name, u in updates.items()}


@dataclass(frozen=True)
class OfMany(Combine):
    def __call__(self, updates, shares, cohort, layout):
        return combine(updates, shares, cohort, layout)


@paper
def many(base: Algorithm) -> Algorithm:
    return replace(base, combine=OfMany())


def outside(pool):
    return Holdings.of([torch.arange(5), torch.tensor([9, 10_000])])


def twice(pool):
    return Holdings.of([torch.arange(5), torch.arange(4, 8)])


def nothing(pool):
    return Holdings.of([torch.arange(0), torch.arange(0)])
"""


@pytest.fixture(autouse=True)
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    file = tmp_path / "own_rules.py"
    file.write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    yield file
    sys.modules.pop("own_rules", None)


def experiment(algorithm: str | list[str] = "fedavg", **settings: object) -> fl.Experiment:
    tables = {"dataset": "fashion-mnist-mini", "model": "linear", "rounds": 1, "engine": "stacked"}
    clients = {"count": 20, "per_round": 2}
    return fl.Experiment.of({**tables, "clients": clients, "algorithm": algorithm, **settings})


@pytest.mark.parametrize(
    ("name", "line"),
    [
        (
            "one_number",
            r"<lambda> \(own_rules.py, line \d+\) gave a tensor \[\], and not \[1\]: return",
        ),
        ("misspelled", r"own_rules.py, line \d+, in <lambda>: AttributeError: .*: fix it there"),
        ("a_dict", r"a round fails by what it returns \(AttributeError: .*docs/extend.md says"),
        ("named_as_ours", "the scalar 'train_loss' is recorded already: choose another name"),
        ("named_as_a_measure", "the scalar 'test_drift' has the name of a measure of the model"),
        ("named_as_a_setting", "the scalar 'server.drift' has the name of a setting: choose"),
        ("measured_as_ours", "the scalar 'test_accuracy' has the name of a measure of the model"),
        ("silent", r"a round fails by what it returns \(TypeError: "),
    ],
)
def test_an_algorithm_of_ones_own_is_tried_before_anything_is_written(name, line, tmp_path):
    with pytest.raises(ValueError, match=f"algorithm 'own_rules:{name}': {line}"):
        fl.run(experiment(f"own_rules:{name}"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_one_that_draws_random_numbers_by_itself_is_told_of(caplog):
    before = torch.get_rng_state()
    with caplog.at_level(logging.WARNING, "fedlens"):
        build(experiment("own_rules:right"))
        assert not caplog.records
        build(experiment("own_rules:drawing"))
    (told,) = caplog.records
    assert "by itself, so no run of it can be repeated: draw by local.key" in told.getMessage()
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("outside", "gives somebody example 10000, but they are 0 to 5999: fix it"),
        ("twice", "gives example 4 to 2 clients, or twice to one: an example has one holder"),
        ("nothing", "gives nobody an example"),
    ],
)
def test_a_split_of_ones_own_is_looked_at(name, line):
    clients = {"count": 2, "per_round": 1, "partition": f"own_rules:{name}"}
    with pytest.raises(ValueError, match=f"partition 'own_rules:{name}' {line}"):
        partition(experiment(clients=clients))


def test_going_on_with_other_code_of_ones_own_is_told(own, tmp_path, caplog):
    described = experiment("own_rules:right", rounds=2)
    fl.run(described, tmp_path / "run")
    own.write_text(OWN.replace("mu * pulled", "2 * mu * pulled"))
    sys.modules.pop("own_rules")
    with caplog.at_level(logging.WARNING, "fedlens"):
        fl.resume(tmp_path / "run", rounds=3, trust_code=True)
    told = [record.getMessage() for record in caplog.records]
    assert any(
        "was started with another own_rules: its rounds differ from then on" in t for t in told
    )


def test_a_grid_takes_what_is_named_in_python():
    choices = ["fedavg", fl.Named("fedprox", {"mu": 0.1}), [fl.Named("fedvc"), "fedavgm"]]
    points = fl.grid(experiment(), {"algorithm": choices})
    assert [[one.name for one in point.algorithm] for point in points.values()] == [
        ["fedavg"],
        ["fedprox"],
        ["fedvc", "fedavgm"],
    ]
    assert points[list(points)[1]].algorithm[0].options["mu"] == 0.1


def test_one_that_needs_more_clients_than_the_few_is_tried_with_all():
    clients = {"count": 20, "per_round": 12}
    described = experiment(clients=clients, algorithm=["own_rules:many", "own_rules:right"])
    assert build(described).experiment.clients.per_round == 12
    with pytest.raises(ValueError, match="combine"):
        build(experiment("own_rules:many"))  # of two clients
