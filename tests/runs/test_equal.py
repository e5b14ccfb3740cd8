"""A run that an earlier Fedlens wrote is still the run of its experiment."""

import json
from dataclasses import replace

import pytest

import fedlens as fl
from fedlens.recipes.reproduce import plan, reproduce
from fedlens.runs.manifest import is_run_of, text_of

PLAIN = fl.Experiment(
    dataset="fashion-mnist-mini",
    model="linear",
    rounds=1,
    engine="sequential",
    clients=fl.Clients(count=20, per_round=4),
)


def forget_keys(run):
    """Let the file be one of a Fedlens that had no label smoothing, rotation or bootstrap yet."""
    file = run / "experiment.toml"
    lines = file.read_text("utf-8").replace(
        'loss = { name = "cross_entropy", label_smoothing = 0.0 }', 'loss = "cross_entropy"'
    )
    kept = [line for line in lines.splitlines() if line not in ("rotate = 0.0", "bootstrap = 0")]
    assert len(kept) == len(lines.splitlines()) - 2
    file.write_text("\n".join(kept) + "\n", "utf-8")
    manifest = json.loads((run / "manifest.json").read_text("utf-8"))
    begun = manifest["settings"]
    begun["loss"] = begun["loss"]["name"]
    del begun["augment"]["rotate"], begun["evaluate"]["bootstrap"]
    (run / "manifest.json").write_text(json.dumps(manifest), "utf-8")


def test_keys_that_came_later_have_their_defaults(tmp_path):
    fl.run(PLAIN, out=tmp_path / "run")
    text = (tmp_path / "run" / "experiment.toml").read_text("utf-8")
    forget_keys(tmp_path / "run")
    assert text_of(tmp_path / "run") == text
    assert is_run_of(tmp_path / "run", PLAIN)
    assert not is_run_of(tmp_path / "run", replace(PLAIN, seed=1))


def test_a_file_of_a_later_fedlens_is_no_experiment_of_ours(tmp_path):
    fl.run(PLAIN, out=tmp_path / "run")
    file = tmp_path / "run" / "experiment.toml"
    file.write_text("later = 1\n" + file.read_text("utf-8"), "utf-8")
    assert text_of(tmp_path / "run") == file.read_text("utf-8")
    assert not is_run_of(tmp_path / "run", PLAIN)


class Stopped(Exception):
    pass


def test_a_run_that_an_earlier_fedlens_did_not_end_goes_on_to_the_same_bytes(tmp_path):
    longer = replace(PLAIN, rounds=3)

    def stop(record):
        if record.get("round") == 2:
            raise Stopped

    with pytest.raises(Stopped):
        fl.run(longer, out=tmp_path / "old", watch=stop)
    forget_keys(tmp_path / "old")
    fl.resume(tmp_path / "old")
    fl.run(longer, out=tmp_path / "new")
    old, new = (tmp_path / name / "model.safetensors" for name in ("old", "new"))
    assert old.read_bytes() == new.read_bytes()


def test_another_setting_than_the_one_it_began_with_is_still_refused(tmp_path):
    fl.run(PLAIN, out=tmp_path / "run")
    forget_keys(tmp_path / "run")
    file = tmp_path / "run" / "experiment.toml"
    file.write_text(
        file.read_text("utf-8").replace("[augment]", "[augment]\nrotate = 9.0"), "utf-8"
    )
    with pytest.raises(ValueError, match=r"augment\.rotate"):
        fl.resume(tmp_path / "run", rounds=2)


def test_a_sweep_of_an_earlier_fedlens_is_kept(tmp_path):
    points = fl.grid(PLAIN, {}, seeds=2)
    fl.sweep(points, tmp_path / "sweep")
    runs = [tmp_path / "sweep" / name for name in points]
    for run in runs:
        forget_keys(run)
    written = [(run / "summary.json").stat().st_mtime_ns for run in runs]
    fl.sweep(points, tmp_path / "sweep")
    assert [(run / "summary.json").stat().st_mtime_ns for run in runs] == written
    with pytest.raises(ValueError, match="holds another experiment"):
        fl.sweep({n: replace(e, rounds=2) for n, e in points.items()}, tmp_path / "sweep")


def test_a_reproduction_of_an_earlier_fedlens_is_gone_on_with_and_taken_over(tmp_path, monkeypatch):
    monkeypatch.delenv("FEDLENS_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    reproduce("fedavg-cifar10/headline", "smoke", tmp_path / "headline")
    for run in (tmp_path / "headline" / "runs").iterdir():
        forget_keys(run)
    assert not plan("fedavg-cifar10/headline", "smoke", tmp_path / "headline").left
    watched: list[object] = []
    reproduce("fedavg-cifar10/figure12", "smoke", tmp_path / "figure12", watch=watched.append)
    assert not watched
