import json
import math
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fedlens as fl
from fedlens.engines import Stacked
from fedlens.engines.graphs import Captures, EagerCapture
from fedlens.network.network import Network
from fedlens.rounds import ClientMemory, begin, run_round
from fedlens.runs.evaluate import Evaluation, correct_answers
from fedlens.runs.folder import RunFolder
from fedlens.runs.metrics import accuracy_by_client, spread
from fedlens.runs.summary import Record
from fedlens.setup import build, partition
from tests.checkpoints import load_state

OF_TRAINING = {
    "round",
    "seconds",
    "train_loss",
    "batches",
    "batches_total",
    "examples",
    "clients",
    "bytes_up",
    "bytes_down",
}
MEASURES = {"accuracy", "loss", "top5", "precision", "recall", "f1", "classes_predicted"}
SPREAD = {
    f"client_accuracy_{key}"
    for key in ("mean", "std", "min", "p10", "median", "max", "worst_decile", "jain")
}


def of(part: str) -> set[str]:
    return {f"{part}_{measure}" for measure in MEASURES}


EVALUATED = OF_TRAINING | {"evaluation_seconds"}


def toy(num_examples: int = 60, num_classes: int = 3, seed: int = 0) -> fl.Dataset:
    """Noisy images of 2x6x6 whose brightness is their label."""
    rng = torch.Generator().manual_seed(seed)
    labels = torch.arange(num_examples) % num_classes
    images = torch.randn(num_examples, 2, 6, 6, generator=rng) + labels.view(-1, 1, 1, 1)
    test = fl.Examples(images[:30] + 0.1, labels[:30])
    return fl.Dataset("toy", fl.Examples(images, labels), test, tuple("abcdef"[:num_classes]))


def normed() -> nn.Sequential:
    """A small network with batch normalisation, always with the same weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        layers = (nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten())
        return nn.Sequential(*layers, nn.Linear(64, 3))


def described(**changes: Any) -> fl.Experiment:
    plain: dict[str, Any] = {"dataset": toy(), "model": normed(), "rounds": 3}
    plain |= {"engine": "sequential", "clients": fl.Clients(count=5, per_round=2)}
    return fl.Experiment(**plain | changes)


def lines(folder: Path) -> list[Record]:
    return [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]


def test_a_run_leaves_exactly_the_files_and_keys_of_the_design(tmp_path):
    experiment = fl.Experiment(
        dataset=fl.Named("fashion-mnist-mini"),
        model=fl.Named("linear"),
        rounds=3,
        clients=fl.Clients(count=10, per_round=3),
    )
    result = fl.run(experiment, tmp_path / "run")
    files = {path.name for path in (tmp_path / "run").iterdir()}
    assert files == {
        *("experiment.toml", "manifest.json", "partition.json", "rounds.jsonl"),
        *("summary.json", "evaluation.json", "checkpoint", "model.safetensors"),
    }
    written = lines(tmp_path / "run")
    assert [record["round"] for record in written] == [1, 2, 3]
    assert all(record.keys() == EVALUATED | of("test") for record in written)
    assert written == result.records
    for record in written:
        assert 0 < record["test_accuracy"] <= record["test_top5"] <= 1
        assert record["seconds"] > 0
        assert record["batches"] == math.ceil(600 / 32)
        assert record["bytes_up"] == record["bytes_down"] == 3 * 7850 * 4
    assert written[-1]["train_loss"] < written[0]["train_loss"]

    text = (tmp_path / "run" / "experiment.toml").read_text()
    assert text == experiment.toml()
    assert fl.Experiment.of(tomllib.loads(text)) == experiment

    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    expected = {"fedlens": fl.__version__, "torch": torch.__version__, "seed": 0, "device": "cpu"}
    assert manifest.items() >= (expected | {"parameters": 7850}).items()
    assert manifest["partition"] == partition(experiment)[2].digest()
    assert {"python", "numpy", "revision", "engine"} <= manifest.keys()

    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary == result.summary
    assert summary["status"] == result.status == "finished"
    assert summary["rounds"] == 3
    assert summary["final"].keys() == of("test") | {"train_loss"}
    assert summary["final"].items() <= written[-1].items()
    best = max(written, key=lambda record: record["test_accuracy"])
    assert summary["best"]["test_accuracy"] == {
        "value": best["test_accuracy"],
        "round": best["round"],
    }
    assert summary["best"]["test_loss"]["value"] == min(r["test_loss"] for r in written)
    assert summary["best"].keys() == of("test") - {"test_classes_predicted"}
    for key in ("bytes_up", "bytes_down", "batches", "examples"):
        assert summary[key] == sum(record[key] for record in written)
    assert [record["batches_total"] for record in written] == [19, 38, 57]
    first, second = (record["test_accuracy"] for record in written[:2])
    assert summary["at_rounds"] == {"1": first, "2": second}
    assert summary["at_batches"] == {"20": first, "50": second}
    assert summary["seconds"]["training"] == pytest.approx(sum(r["seconds"] for r in written))
    seconds = summary["seconds"]
    assert seconds["total"] >= seconds["training"] + seconds["evaluation"] > seconds["training"]
    assert 0 <= summary["emd"] < 0.5
    assert summary["peak_memory_bytes"] > 10**7
    clients = json.loads((tmp_path / "run" / "partition.json").read_text())
    assert clients.keys() == {"num_clients", "sizes", "label_counts", "emd"}


def test_the_model_file_holds_what_the_run_returned(tmp_path):
    from safetensors.torch import load_file

    result = fl.run(described(), tmp_path / "run")
    saved = load_file(tmp_path / "run" / "model.safetensors")
    module = normed()
    module.load_state_dict(saved)
    assert saved.keys() == result.model.keys() == module.state_dict().keys()
    assert all(torch.equal(saved[name], tensor) for name, tensor in result.model.items())
    images, labels = toy().test.images, toy().test.labels
    found = (module.eval()(images).argmax(1) == labels).double().mean()
    assert float(found) == pytest.approx(result.final["test_accuracy"])


def test_the_record_says_who_took_part():
    clients = fl.Clients(count=6, per_round=3)
    drawn = [record["clients"] for record in fl.run(described(clients=clients, rounds=4)).records]
    assert all(len(set(cohort)) == 3 and set(cohort) <= set(range(6)) for cohort in drawn)
    assert len(set(map(tuple, drawn))) > 1
    by_size = fl.Named("fedprox", {"mu": 0.0, "sampling": "by-size"})
    printed = fl.run(described(clients=clients, rounds=4, algorithm=by_size)).records
    assert {len(record["clients"]) for record in printed} == {3}
    assert any(len(set(record["clients"])) < 3 for record in printed)


def test_a_run_without_a_folder_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    told: list[Record] = []
    result = fl.run(described(), watch=told.append)
    assert result.folder is None
    assert told == result.records
    assert not list(tmp_path.iterdir())


def test_a_folder_that_exists_is_refused_before_anything_is_made(tmp_path):
    lost = fl.Named("npz", {"path": str(tmp_path / "lost.npz")})
    with pytest.raises(ValueError, match="exists: choose another, or set overwrite=True"):
        fl.run(described(dataset=lost), tmp_path)
    with pytest.raises(ValueError, match=r"lost.npz cannot be read"):
        fl.run(described(dataset=lost), tmp_path / "run")


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
    with pytest.raises(ValueError, match="rounds are counted from 1"):
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


@pytest.mark.parametrize("engine", ["sequential", "stacked", "processes"])
def test_the_manifest_names_the_engine_as_the_experiment_does(tmp_path, engine):
    fl.run(described(engine=engine, rounds=1), tmp_path / "run")
    assert json.loads((tmp_path / "run" / "manifest.json").read_text())["engine"] == engine


def test_the_spread_over_clients_is_told_where_they_hold_examples_out():
    result = fl.run(described(clients=fl.Clients(count=5, per_round=2, holdout=0.3)))
    last = result.records[-1]
    assert last.keys() == EVALUATED | of("test") | SPREAD
    low, middle, high = (last[f"client_accuracy_{key}"] for key in ("min", "median", "max"))
    assert 0 <= low <= middle <= high <= 1
    best = result.summary["best"]["client_accuracy_std"]["value"]
    assert best == min(record["client_accuracy_std"] for record in result.records)


@pytest.mark.parametrize("outputs", [1000, 4])
def test_a_head_may_have_more_outputs_than_there_are_classes(outputs):
    clients = fl.Clients(count=5, holdout=0.2)
    result = fl.run(described(model="linear", outputs=outputs, rounds=9, clients=clients))
    assert result.model["fc.weight"].shape == (outputs, 72)
    assert result.final.keys() >= of("test") | SPREAD
    assert result.final["test_accuracy"] > 0.4


@pytest.mark.parametrize("norm", ["shared", "local", "group"])
def test_a_module_with_batch_normalisation_is_trained_as_asked_and_left_as_it_was(norm):
    module = normed()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    clients = fl.Clients(count=5, per_round=3, holdout=0.25)
    result = fl.run(described(model=module, norm=norm, clients=clients, rounds=4))
    assert result.records[-1]["train_loss"] < result.records[0]["train_loss"]
    assert result.final.keys() >= SPREAD
    assert ("1.running_mean" in result.model) == (norm != "group")
    after = module.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert module.training
    assert type(module[1]) is nn.BatchNorm2d
    again = fl.run(described(model=module, norm=norm, clients=clients, rounds=4))
    assert all(torch.equal(again.model[name], t) for name, t in result.model.items())


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
    rows = {client: {"norm": own} for client, own in kept.items()}
    setup = build(experiment)
    assert setup.client_tests is not None
    examples, held_out = setup.federation.examples, setup.client_tests.holdings
    altered = replace(state, clients=ClientMemory(rows))
    correct = correct_answers(setup.engine, altered, examples, held_out)
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
    assert recorder.num_plays == 2 * 3  # the test set and the clients, from the third time on


def test_large_images_are_evaluated_a_few_at_a_time_to_the_same_result(monkeypatch):
    experiment = described(clients=fl.Clients(count=4, holdout=0.5))
    whole = fl.run(experiment).final
    seen = []
    predict = Network.predict

    def counted(self, params, buffers, images):
        seen.append(len(images))
        return predict(self, params, buffers, images)

    monkeypatch.setattr("fedlens.runs.evaluate.PIXELS", 7 * 6 * 6)
    monkeypatch.setattr(Network, "predict", counted)
    assert fl.run(experiment).final == pytest.approx(whole)
    assert max(seen) == 7


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.float64])
def test_images_may_be_bytes_or_floats_of_any_shape(dtype):
    labels = torch.arange(40) % 2
    images = (labels.view(-1, 1, 1, 1) * 200 + torch.zeros(40, 4, 5, 3)).to(dtype)
    part = fl.Examples(images / 255 if dtype.is_floating_point else images, labels)
    dataset = fl.Dataset("own", part, part, ("dark", "light"))
    result = fl.run(described(dataset=dataset, model="linear", rounds=10))
    assert result.final["test_accuracy"] == 1.0


def federated(folder: Path, seed: int) -> fl.Result:
    """The issue's own experiment: 100 clients, Hsu's Dirichlet with alpha 0.5, 10 a round."""
    partition = fl.Named("dirichlet", {"alpha": 0.5})
    experiment = fl.Experiment(
        dataset=fl.Named("fashion-mnist-mini"),
        model=fl.Named("lenet5"),
        rounds=2,
        seed=seed,
        clients=fl.Clients(count=100, per_round=10, partition=partition),
        local=fl.LocalTraining(batch_size=20),
        evaluate=fl.Evaluate(every=2),
    )
    return fl.run(experiment, folder)


def test_one_seed_gives_the_same_bytes_and_another_seed_others(tmp_path):
    runs = {"a": 0, "b": 0, "c": 1}
    results = {name: federated(tmp_path / name, seed) for name, seed in runs.items()}
    models = {name: (tmp_path / name / "model.safetensors").read_bytes() for name in runs}
    assert models["a"] == models["b"]
    assert models["a"] != models["c"]
    timeless = [
        [{k: v for k, v in r.items() if not k.endswith("seconds")} for r in results[name].records]
        for name in ("a", "b")
    ]
    assert timeless[0] == timeless[1]


def test_the_clients_seed_fixes_the_split_alone(tmp_path):
    def split_and_model(seed: int, clients_seed: int | None) -> tuple[str, bytes]:
        folder = tmp_path / f"{seed}-{clients_seed}"
        clients = fl.Clients(count=5, per_round=2, seed=clients_seed)
        fl.run(described(seed=seed, clients=clients, model="linear", rounds=1), folder)
        manifest = json.loads((folder / "manifest.json").read_text())
        return manifest["partition"], (folder / "model.safetensors").read_bytes()

    (split, model), (same_split, other_model) = split_and_model(0, 7), split_and_model(1, 7)
    assert same_split == split
    assert other_model != model
    assert split_and_model(0, None)[0] != split_and_model(1, None)[0]
    assert split_and_model(0, 8)[0] != split


def test_the_engines_agree_on_the_record():
    engines = ("sequential", "stacked", "processes")
    records = [fl.run(described(engine=engine)).records for engine in engines]
    for other in records[1:]:
        for one, two in zip(records[0], other, strict=True):
            assert one.keys() == two.keys()
            assert two["train_loss"] == pytest.approx(one["train_loss"], rel=1e-4)
            assert two["batches"] == one["batches"]


def test_one_client_that_holds_everything_is_centralised_training():
    local = fl.LocalTraining(epochs=1, batch_size=60, lr=0.1)
    alone = described(model="linear", clients=fl.Clients(count=1), local=local, rounds=3)
    result = fl.run(alone)
    assert result.records[-1]["batches"] == 1
    # One batch of everything is plain gradient descent on the whole set.
    start = fl.run(replace(alone, rounds=1, local=replace(local, lr=0.0))).model
    weight, bias = (start[name].clone().requires_grad_() for name in ("fc.weight", "fc.bias"))
    train = toy().train
    for _ in range(3):
        logits = train.images.flatten(1) @ weight.T + bias
        loss = nn.functional.cross_entropy(logits, train.labels)
        slopes = torch.autograd.grad(loss, [weight, bias])
        weight, bias = (
            (w - 0.1 * g).detach().requires_grad_()
            for w, g in zip((weight, bias), slopes, strict=True)
        )
    assert torch.allclose(result.model["fc.weight"], weight, atol=1e-5)
    assert torch.allclose(result.model["fc.bias"], bias, atol=1e-5)
