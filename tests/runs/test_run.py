"""What a run does, writes and records."""

import json
import math
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import fedlens as fl
from fedlens.runs.records import Record
from fedlens.setup import partition
from tests.runs.small_runs import EVALUATED, SPREAD, described, lines, normed, of, toy


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
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").touch()
    with pytest.raises(ValueError, match="exists"):
        fl.run(described(dataset=lost), tmp_path / "full")
    with pytest.raises(ValueError, match=r"lost\.npz"):
        fl.run(described(dataset=lost), tmp_path / "run")


@pytest.mark.parametrize("engine", ["sequential", "stacked", "processes"])
def test_the_manifest_names_the_engine_as_the_experiment_does(tmp_path, engine):
    fl.run(described(engine=engine, rounds=1), tmp_path / "run")
    assert json.loads((tmp_path / "run" / "manifest.json").read_text())["engine"] == engine


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
