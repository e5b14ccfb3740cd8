"""When a run evaluates its model, on what, and how."""

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

import fedlens as fl
from fedlens.core.federation import Examples
from fedlens.engines import Processes, Stacked
from fedlens.engines.graphs import Captures
from fedlens.evaluation import evaluate
from fedlens.evaluation.evaluate import Evaluation, correct_answers
from fedlens.evaluation.metrics import accuracy_by_client, spread
from fedlens.network.network import Network
from fedlens.rounds import ClientMemory, begin, run_round
from fedlens.runs.folder import RunFolder
from fedlens.setup import build
from tests.checkpoints import load_state
from tests.eager_capture import EagerCapture, num_replays
from tests.runs.small_runs import EVALUATED, OF_TRAINING, SPREAD, described, normed, of


@pytest.mark.parametrize(
    ("rounds", "every", "evaluated"),
    [(5, 1, [1, 2, 3, 4, 5]), (5, 2, [2, 4, 5]), (4, 2, [2, 4]), (3, 100, [3])],
)
def test_every_so_many_rounds_are_evaluated_and_always_the_last(rounds, every, evaluated):
    result = fl.run(described(rounds=rounds, evaluate=fl.Evaluate(every=every)))
    assert len(result.records) == rounds
    assert [r["round"] for r in result.records if "test_loss" in r] == evaluated
    assert all(record.keys() >= OF_TRAINING for record in result.records)


def test_rounds_may_be_named_for_evaluation_besides():
    result = fl.run(described(rounds=6, evaluate=fl.Evaluate(every=4, at=(1, 5, 9))))
    assert [r["round"] for r in result.records if "test_loss" in r] == [1, 4, 5, 6]
    assert fl.Experiment.of(
        {"dataset": "mnist", "model": "linear", "rounds": 6} | {"evaluate": {"at": [1, 5]}}
    ).evaluate.at == (1, 5)
    with pytest.raises(ValueError, match="at is 0"):
        fl.Evaluate(at=(0,))


def test_any_part_may_be_evaluated_on():
    on = fl.Evaluate(on=("train", "validation"), validation=0.5)
    result = fl.run(described(evaluate=on))
    # `train_loss` is the loss of local training, so that of the whole part has another name.
    measured = (of("train") - {"train_loss"}) | {"train_set_loss"} | of("validation")
    assert all(record.keys() == EVALUATED | measured for record in result.records)
    assert result.final.keys() == measured | {"train_loss"}
    test = fl.run(described(evaluate={"on": "test"}))
    assert test.final.keys() == of("test") | {"train_loss"}
    nothing = fl.run(described(evaluate=fl.Evaluate(on=())))
    assert nothing.final.keys() == {"train_loss"}


def test_the_spread_over_clients_is_told_where_they_hold_examples_out():
    result = fl.run(described(clients=fl.Clients(count=5, per_round=2, holdout=0.3)))
    last = result.records[-1]
    assert last.keys() == EVALUATED | of("test") | SPREAD | {"client_accuracy"}
    low, middle, high = (last[f"client_accuracy_{key}"] for key in ("min", "median", "max"))
    assert 0 <= low <= middle <= high <= 1
    best = result.summary["best"]["client_accuracy_std"]["value"]
    assert best == min(record["client_accuracy_std"] for record in result.records)


def test_the_last_evaluation_is_kept_in_detail(tmp_path):
    clients = fl.Clients(count=4, holdout=0.4)
    final = fl.run(described(clients=clients, rounds=2), tmp_path / "run").final
    details = json.loads((tmp_path / "run" / "evaluation.json").read_text())
    confusion = torch.tensor(details["confusion"])
    assert details["part"] == "test"
    assert confusion.diagonal().sum() / confusion.sum() == pytest.approx(final["test_accuracy"])
    by_client = torch.tensor(details["client_accuracy"], dtype=torch.float64)
    assert len(by_client) == 4
    assert float(by_client.mean()) == pytest.approx(final["client_accuracy_mean"])


def test_clients_are_tested_with_the_normalisation_layers_they_keep(tmp_path):
    experiment = described(norm="local", clients=fl.Clients(count=4, holdout=0.4), rounds=9)
    fl.run(experiment, tmp_path / "run")
    state = load_state(RunFolder(tmp_path / "run"))
    assert state.clients.rows.keys() == {0, 1, 2, 3}
    # Clients 0 and 1 keep layers that let nothing through: they predict one class for all.
    silent = {"1.weight": torch.zeros(4), "1.bias": torch.zeros(4)}
    kept = {0: silent, 1: silent}
    rows = {client: {"own": own} for client, own in kept.items()}
    setup = build(experiment)
    assert setup.client_tests is not None
    examples, held_out = setup.federation.examples, setup.client_tests.holdings
    altered = replace(state, clients=ClientMemory(rows))
    correct = correct_answers(setup, setup.engine, altered)
    found = spread(accuracy_by_client(correct, held_out))

    def mean_accuracy(own: dict[int, dict[str, torch.Tensor]]) -> float:
        accuracies = []
        for client in range(4):
            module = normed().eval()
            module.load_state_dict(state.params | state.buffers | own.get(client, {}))
            index = held_out.members(client)
            answers = module(examples.images[index]).argmax(1)
            accuracies.append((answers == examples.labels[index]).double().mean())
        return float(torch.stack(accuracies).mean())

    assert found["mean"] == pytest.approx(mean_accuracy(kept))
    assert found["mean"] < mean_accuracy({}) - 0.1


def test_recorded_evaluations_are_those_of_the_model_that_is_given():
    experiment = described(clients=fl.Clients(count=4, holdout=0.5))
    setup = build(experiment)
    recorder = Captures(EagerCapture)
    engine = Stacked(setup.network, setup.federation.examples, make_recorder=lambda: recorder)
    state = begin(setup.network, setup.program, setup.federation, setup.device)
    for seed in range(5):
        state, _ = run_round(setup.program, setup.federation, setup.engine, state, seed)
        plain, recorded = (
            Evaluation(setup, one, state).read(None) for one in (setup.engine, engine)
        )
        assert recorded[0] == pytest.approx(plain[0])
        assert recorded[1].plain() == plain[1].plain()
    setup.engine.close()
    assert num_replays(recorder) == 2 * 3  # the test set and the clients, from the third time on


def test_large_images_are_evaluated_a_few_at_a_time_to_the_same_result(monkeypatch):
    experiment = described(clients=fl.Clients(count=4, holdout=0.5))
    whole = fl.run(experiment).final
    seen = []
    predict = Network.predict

    def counted(self, params, buffers, images, **how):
        seen.append(len(images))
        return predict(self, params, buffers, images, **how)

    monkeypatch.setattr("fedlens.evaluation.evaluate.PIXELS", 7 * 6 * 6)
    monkeypatch.setattr(Network, "predict", counted)
    assert fl.run(experiment).final == pytest.approx(whole)
    assert max(seen) == 7


def test_workers_on_gpus_are_given_large_batches():
    """Each is a message, and to launch kernels costs more than a few images."""
    images = torch.zeros(2, 1, 8, 8, dtype=torch.uint8)
    examples = Examples(images, torch.zeros(2, dtype=torch.int64))
    network = Network(nn.Sequential(nn.Flatten(), nn.Linear(64, 2)))
    sizes = {
        device: evaluate.batch_of(
            Processes(network, examples, devices=[torch.device(device)]), examples
        )
        for device in ("cpu", "cuda")
    }
    assert sizes == {"cpu": evaluate.BATCH, "cuda": evaluate.GPU_BATCH}
