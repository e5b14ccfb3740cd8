"""The config.json of the FedAvg report."""

import json

import pytest

from fedlens.config.experiment import Experiment
from fedlens.config.first_report import BOOK, PLACES, imported
from fedlens.recipes.fedavg_cifar10.setting import LAMBDA, experiment, sizes
from fedlens.recipes.recipe import Recorded, Scale

SCALE = Scale("paper", recorded=Recorded(frozenset({"cifar10"}), ()))


def test_the_books_file_is_the_setting_of_our_recipes():
    """They are of the report: five clients, three a round, in place of ten and five."""
    tables, lines = imported({**BOOK, "no_models": 5, "k": 3})
    ours = experiment(SCALE, LAMBDA, partition=sizes("homogeneous"), scratch=True)
    found = Experiment.of(tables)
    unlike = {"engine", "clients"}
    for key, value in found.plain().items():
        assert key in unlike or value == ours.plain()[key], key
    assert (found.clients.count, found.clients.per_round) == (5, 3)
    assert found.clients.partition.options["sizes"] == "homogeneous"
    assert len(lines) == len(PLACES) + 4 and lines[1] == 'type: now dataset = "cifar10"'


def test_what_is_left_out_is_the_books_and_said():
    _, lines = imported({"k": 6})
    assert "assumed: lambda is 0.1, as in the book" in lines
    assert sum(line.startswith("assumed: ") for line in lines) == len(PLACES) - 1 + 3


@pytest.mark.parametrize(
    ("changed", "word"),
    [
        ({"type": "imagenet"}, "cifar"),
        ({"model_name": "resnet19"}, "resnet18"),
        ({"kk": 3}, "'k'"),
        ({"no_models": 2, "k": 6}, "per_round"),
        ({"lr": -1}, "local.lr"),
    ],
)
def test_what_it_cannot_be_is_refused(changed, word):
    with pytest.raises(ValueError, match=word):
        Experiment.of(imported({**BOOK, **changed})[0])


def test_the_command_writes_an_experiment_and_run_names_the_command(fedlens, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(BOOK))
    done = fedlens("import", "config.json")
    assert done.status == 0 and "next:       fedlens run config.toml" in done.out
    assert "lambda: now algorithm.lambda-sum.lambda = 0.1" in done.out
    assert Experiment.read("config.toml") == Experiment.of(imported(BOOK)[0])
    assert fedlens("import", "config.json").status == 2
    refused = fedlens("run", "config.json")
    assert refused.status == 2 and "fedlens import config.json" in refused.err
