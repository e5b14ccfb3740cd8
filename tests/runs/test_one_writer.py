"""Run folders have one writer, and go on only with what they were begun with."""

import json
import logging
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fedlens as fl
from fedlens.runs import manifest as manifests
from fedlens.runs.records import Record
from tests.command_line import everything
from tests.toys import toy


def described(**changes: Any) -> fl.Experiment:
    plain: dict[str, Any] = {
        "dataset": toy(),
        "model": "linear",
        "rounds": 3,
        "engine": "sequential",
    }
    return fl.Experiment(**plain | {"clients": fl.Clients(4, 2)} | changes)


def lines(folder: Path) -> list[Record]:
    return [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]


def refused(record: Record, *tries) -> None:
    for one in tries:
        with pytest.raises(ValueError, match=r"process \d+ on"):
            one()


def test_a_live_run_is_neither_resumed_nor_overwritten(tmp_path):
    run, seen = tmp_path / "run", []

    def meanwhile(record: Record) -> None:
        seen.append(record)
        refused(
            record,
            lambda: fl.resume(run, experiment=described()),
            lambda: fl.run(described(), run, overwrite=True),
        )

    fl.run(described(), run, watch=meanwhile)
    assert len(seen) == 3
    assert [record["round"] for record in lines(run)] == [1, 2, 3]
    assert fl.resume(run, experiment=described()).status == "finished", "it lets go at the end"


def test_a_sweep_that_runs_is_not_run_a_second_time(tmp_path):
    points = fl.grid(described(), {}, seeds=2)
    seen = []

    def meanwhile(record: Record) -> None:
        seen.append(record["point"])
        refused(
            record,
            lambda: fl.sweep(points, tmp_path / "sweep"),
            lambda: fl.sweep(points, tmp_path / "sweep", overwrite=True),
        )

    fl.sweep(points, tmp_path / "sweep", watch=meanwhile)
    assert seen == ["seed=0"] * 3 + ["seed=1"] * 3
    for name in points:
        assert [record["round"] for record in lines(tmp_path / "sweep" / name)] == [1, 2, 3]


def test_a_run_that_fails_to_start_or_to_go_on_lets_go_of_its_folder(tmp_path, monkeypatch):
    run = tmp_path / "run"
    fl.run(described(), run)
    for _ in range(2):
        with pytest.raises(ValueError, match="was started with"):
            fl.resume(run, experiment=described(seed=5))
    points = fl.grid(described(engine="stacked"), {}, seeds=2)
    fl.sweep(points, tmp_path / "sweep")
    (tmp_path / "sweep" / "seed=1" / "summary.json").unlink()
    (tmp_path / "sweep" / "seed=1" / "checkpoint" / "state-000003.json").write_text("")
    (tmp_path / "sweep" / "seed=0" / "summary.json").unlink()
    for _ in range(2):
        with pytest.raises(ValueError, match=r"state-000003\.json"):
            fl.sweep(points, tmp_path / "sweep")


def changed(part: str) -> fl.Dataset:
    whole = toy()
    images, labels = whole.train.images.clone(), whole.train.labels.clone()
    if part == "pixel":
        images[7, 0, 2, 2] += 1e-3
    else:
        labels[7] = (labels[7] + 1) % 3
    return replace(whole, train=fl.Examples(images, labels))


@pytest.mark.parametrize("part", ["pixel", "label"])
def test_other_pixels_or_labels_are_refused(tmp_path, monkeypatch, part):
    monkeypatch.chdir(tmp_path)
    fl.run(described(), "run")
    before = everything()
    with pytest.raises(ValueError, match="labels"):
        fl.resume("run", experiment=described(dataset=changed(part)))
    assert everything() == before


SETTINGS = {
    "local.lr": ("lr = 0.1", "lr = 0.2", "local.lr = 0.1, not 0.2: put it back in experiment.toml"),
    "batch": ("batch_size = 32", "batch_size = 8", "local.batch_size = 32, not 8: put it back"),
    "algorithm": (
        r"\[\[algorithm\]\][^[]*",
        '[[algorithm]]\nname = "fedavgm"\n',
        "algorithm = 'fedavg', not 'fedavgm': put it back",
    ),
    "fewer": ("rounds = 2", "rounds = 1", "has done 2 rounds: ask for 2 or more"),
}


@pytest.mark.parametrize("what", SETTINGS)
def test_an_edited_experiment_is_refused_by_what_was_edited(tmp_path, what):
    old, new, message = SETTINGS[what]
    run = tmp_path / "run"
    fl.run(fl.Experiment("fashion-mnist-mini", "linear", 2, engine="sequential"), run)
    path = run / "experiment.toml"
    text = path.read_text()
    assert re.search(old, text)
    path.write_text(re.sub(old, new, text))
    with pytest.raises(ValueError) as refusal:
        fl.resume(run)
    assert message in str(refusal.value)


def test_more_rounds_are_asked_for_by_name(tmp_path):
    experiment = fl.Experiment("fashion-mnist-mini", "linear", 1, engine="sequential")
    fl.run(replace(experiment, rounds=3), tmp_path / "whole")
    fl.run(experiment, tmp_path / "run")
    fl.resume(tmp_path / "run", rounds=2)
    assert "rounds = 2" in (tmp_path / "run" / "experiment.toml").read_text()
    fl.resume(tmp_path / "run", rounds=3)
    models = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("run", "whole")]
    assert models[0] == models[1]
    with pytest.raises(ValueError, match="3 rounds"):
        fl.resume(tmp_path / "run", rounds=2)


def test_other_versions_are_said(tmp_path, monkeypatch, caplog):
    run = tmp_path / "run"
    fl.run(described(), run)
    with caplog.at_level(logging.WARNING, "fedlens"):
        fl.resume(run, experiment=described())
        assert caplog.messages == []
        monkeypatch.setattr(manifests, "__version__", "9.9")
        fl.resume(run, experiment=described())
    (said,) = caplog.messages
    assert "was started with fedlens 0.1.0, now 9.9: its bytes may differ" in said


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"partition": None}, "its 'partition' is nothing"),
        ({"settings": []}, "its 'settings' is a list"),
        ({"settings": {}}, "it has no 'rounds'"),
    ],
)
def test_a_manifest_whose_fields_are_not_what_they_should_be_is_refused(tmp_path, wrong, why):
    run = tmp_path / "run"
    fl.run(described(), run)
    manifest = json.loads((run / "manifest.json").read_text())
    (run / "manifest.json").write_text(json.dumps(manifest | wrong))
    with pytest.raises(ValueError, match=rf"manifest.json cannot be read \({why}\): run the"):
        fl.resume(run, experiment=described())


def test_a_manifest_without_a_version_is_gone_on_with_and_that_is_said(tmp_path, caplog):
    run = tmp_path / "run"
    fl.run(described(), run)
    manifest = json.loads((run / "manifest.json").read_text())
    del manifest["torch"]
    (run / "manifest.json").write_text(json.dumps(manifest))
    fl.resume(run, experiment=described())
    (said,) = caplog.messages
    assert f"was started with torch an unknown one, now {torch.__version__}: its" in said


def test_a_fingerprint_of_data_is_of_all_that_is_in_them():
    whole = toy()
    assert whole.digest == toy().digest
    others = [changed("pixel"), changed("label"), replace(whole, classes=("a", "b", "d"))]
    others.append(replace(whole, test=whole.train.take(torch.arange(40))))
    others.append(replace(whole, mean=(0.5,), std=(0.5,)))
    assert len({whole.digest, *(one.digest for one in others)}) == 6


@pytest.mark.parametrize("pixel", [3e38, 1e32])
def test_a_loss_that_is_absurd_at_the_end_is_not_a_finished_run(tmp_path, pixel):
    images = toy().test.images.clone()
    images[3] = pixel
    data = replace(toy(), test=fl.Examples(images, toy().test.labels))
    result = fl.run(described(dataset=data), tmp_path / "run")
    assert result.status == result.summary["status"] == "invalid"
    again = fl.resume(tmp_path / "run", experiment=described(dataset=data))
    assert again.status == "invalid"


def test_a_model_that_starts_with_numbers_that_are_not_finite_is_refused(tmp_path):
    last = torch.nn.Linear(16, 3)
    model = torch.nn.Sequential(torch.nn.Flatten(), last)
    torch.nn.init.constant_(last.bias, float("inf"))
    with pytest.raises(ValueError, match="finite"):
        fl.run(described(model=model), tmp_path / "run")
    assert not (tmp_path / "run").exists()
