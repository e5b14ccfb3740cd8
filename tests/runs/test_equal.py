"""A run that an earlier Fedlens wrote is still the run of its experiment."""

from dataclasses import replace

import pytest

import fedlens as fl
from fedlens.recipes.reproduce import plan, reproduce
from fedlens.runs.equal import is_run_of, text_of

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


def test_a_sweep_of_an_earlier_fedlens_is_kept(tmp_path):
    points = fl.grid(PLAIN, {}, seeds=2)
    fl.sweep(points, tmp_path / "sweep")
    runs = [tmp_path / "sweep" / name for name in points]
    models = [(run / "model.safetensors").stat() for run in runs]
    for run in runs:
        forget_keys(run)
    fl.sweep(points, tmp_path / "sweep")
    assert [(run / "model.safetensors").stat() for run in runs] == models
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
