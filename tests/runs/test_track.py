"""Trackers, faked where they are imported: what they are told, and when."""

import sys
from types import SimpleNamespace

import pytest

import fedlens as fl
from fedlens.runs.track import SINKS, tracking

EXPERIMENT = fl.Experiment(
    dataset=fl.Named("fashion-mnist-mini"),
    model=fl.Named("linear"),
    rounds=2,
    clients=fl.Clients(count=50, per_round=2),
)


class Tracker:
    """Stands for the packages wandb, mlflow and trackio, and notes how it is called."""

    def __init__(self, greeting=""):
        self.calls = []
        self.greeting = greeting

    def __getattr__(self, name):
        def call(*args, **kwargs):
            self.calls.append((name, args, kwargs))
            if self.greeting:
                print(self.greeting)
            return self

        return call

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.calls.append(("exit", (), {}))

    def named(self, name):
        return [(args, kwargs) for called, args, kwargs in self.calls if called == name]


def tracked(name, tracker, folder, monkeypatch):
    monkeypatch.setitem(sys.modules, name, tracker)
    with tracking([name], folder, EXPERIMENT.plain()) as watch:
        assert not tracker.calls, "nothing starts before the run has its folder"
        return fl.run(EXPERIMENT, folder, watch=watch)


@pytest.mark.parametrize(
    ("name", "log", "last"),
    [("wandb", "log", "exit"), ("mlflow", "log_metrics", "exit"), ("trackio", "log", "finish")],
)
def test_a_tracker_is_told_every_record_with_its_round(tmp_path, monkeypatch, name, log, last):
    tracker = Tracker()
    result = tracked(name, tracker, tmp_path / "run", monkeypatch)
    told = tracker.named(log)
    assert [kwargs["step"] for _, kwargs in told] == [1, 2]
    for ((measures,), _), record in zip(told, result.records, strict=True):
        assert measures == {k: v for k, v in record.items() if k not in ("round", "clients")}
    assert tracker.calls[-1][0] == last


def test_a_tracker_is_told_the_experiment_and_the_name_of_the_run(tmp_path, monkeypatch):
    tracker = Tracker()
    tracked("wandb", tracker, tmp_path / "run", monkeypatch)
    ((_, given),) = tracker.named("init")
    assert (given["project"], given["name"], given["dir"]) == (
        "fedlens",
        "run",
        str(tmp_path / "run"),
    )
    assert given["config"]["local.lr"] == 0.1 and given["config"]["algorithm"] == "fedavg"


def test_tensorboard_writes_into_the_run_folder(tmp_path, monkeypatch):
    scalars, opened = [], []

    class SummaryWriter:
        def __init__(self, folder):
            opened.append(folder)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            opened.append("closed")

        def add_text(self, *_):
            pass

        def add_scalar(self, *told):
            scalars.append(told)

    module = SimpleNamespace(SummaryWriter=SummaryWriter)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    result = tracked("tensorboard", Tracker(), tmp_path / "run", monkeypatch)
    assert opened == [str(tmp_path / "run" / "tensorboard"), "closed"]
    assert ("test_accuracy", result.final["test_accuracy"], 2) in scalars


def test_what_trackio_prints_does_not_stand_among_results(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "trackio", Tracker("hello"))
    with tracking(["trackio"], tmp_path, {}) as watch:
        watch({"round": 1})
        capsys.readouterr()
    assert capsys.readouterr() == ("", "hello\n")


def test_a_number_that_is_none_is_not_sent_and_a_twin_is_no_round(tmp_path, monkeypatch):
    tracker = Tracker()
    monkeypatch.setitem(sys.modules, "wandb", tracker)
    with tracking(["wandb"], tmp_path, {}) as watch:
        watch({"twin": 1, "of": 2, "train_loss": 0.5})
        assert not tracker.calls
        watch({"round": 1, "train_loss": float("nan"), "seconds": 2})
    assert tracker.named("log") == [(({"seconds": 2.0},), {"step": 1})]


@pytest.mark.parametrize("name", SINKS)
def test_a_missing_package_is_named_with_its_remedy_before_anything_runs(
    tmp_path, monkeypatch, name
):
    monkeypatch.setitem(sys.modules, name, None)
    with (
        pytest.raises(ValueError, match=rf"needs the package {name} \(.*\): `pip install {name}`"),
        tracking([name], tmp_path, {}),
    ):
        pass


@pytest.mark.parametrize("names", [["tensorbord"], "tensorbord"])
def test_an_unknown_tracker_is_refused(names, tmp_path):
    """A single tracker needs no list."""
    with (
        pytest.raises(ValueError, match="tensorboard"),
        tracking(names, tmp_path, {}),
    ):
        pass
