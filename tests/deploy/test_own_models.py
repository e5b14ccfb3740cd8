"""The model of one client: exported, and asked."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import fedlens as fl
from fedlens.cli.predict import export_command
from fedlens.deploy.own_models import of_client
from fedlens.evaluation import evaluate
from fedlens.setup import build

PLAIN = fl.Experiment(
    dataset="fashion-mnist-mini",
    model="linear",
    rounds=2,
    engine="sequential",
    clients=fl.Clients(count=4, holdout=0.25, partition=fl.Named("shards"), seed=1),
    evaluate=fl.Evaluate(baselines=False),
)


def trained(algorithm: str, out: Path) -> Path:
    fl.run(replace(PLAIN, algorithm=algorithm, evaluate=fl.Evaluate(baselines=False)), out)
    return out


@pytest.mark.parametrize("algorithm", ["ditto", "fine-tune"])
def test_the_model_of_a_client_is_the_one_that_it_is_measured_by(algorithm, tmp_path):
    run = trained(algorithm, tmp_path / "run")
    setup = build(replace(PLAIN, algorithm=algorithm))
    assert setup.client_tests is not None
    kind, key = (
        ("evaluation", "client_accuracy") if algorithm == "ditto" else ("clients", "federated")
    )
    measured = json.loads((run / f"{kind}.json").read_text())[key]
    examples = evaluate.tested_examples(setup, setup.client_tests)
    for client in range(4):
        index = setup.client_tests.holdings.members(client)
        right = evaluate.judge(setup.engine, examples, index)(of_client(run, str(client)))
        assert float(right.double().mean()) == pytest.approx(measured[client])


def test_clients_models_differ_from_each_other_and_from_the_servers(tmp_path):
    run = trained("ditto", tmp_path / "run")
    models = [fl.load(run, client=str(client)) for client in (0, 1)] + [fl.load(run)]
    weights = [next(iter(model.module.state_dict().values())) for model in models]
    assert not any(torch.equal(weights[i], weights[j]) for i, j in ((0, 1), (0, 2), (1, 2)))


def test_a_clients_card_says_whose_model_it_is(tmp_path):
    run = trained("ditto", tmp_path / "run")
    export_command(run, tmp_path / "own.safetensors", client="2", quiet=True)
    assert "client 2" in (tmp_path / "own.safetensors.md").read_text()


@pytest.mark.parametrize(
    ("algorithm", "client", "word"), [("ditto", "ahus", "ahus"), ("fedavg", "1", "one model")]
)
def test_a_client_or_a_model_that_is_not_there_gets_one_line(algorithm, client, word, tmp_path):
    run = trained(algorithm, tmp_path / "run")
    with pytest.raises(ValueError, match=word):
        fl.load(run, client=client)
