"""Whatever is killed, whenever, and begun again comes to the same bytes."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import fedlens as fl
from fedlens.data import store
from fedlens.data.curation import listing
from fedlens.recipes.reproduce import Together, plan_all
from fedlens.storage.run_files import MANIFEST
from tests.data.naturalists import make
from tests.kills import Job, survives
from tests.toys import toy

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks")

SHORT, LONG = 2, 25  # kills of each job


@pytest.fixture(autouse=True)
def often_saved(monkeypatch, tmp_path, one_thread):
    """With a checkpoint after every round, many a kill comes while one is written."""
    monkeypatch.setattr("fedlens.runs.loop.CHECKPOINT_SECONDS", 0.0)
    monkeypatch.setattr("fedlens.runs.loop.SAVING_SHARE", 1.0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def described(**changes: Any) -> fl.Experiment:
    plain: dict[str, Any] = {"dataset": toy(), "model": "linear", "rounds": 4}
    plain |= {"engine": "sequential", "clients": fl.Clients(6, 3)}
    return fl.Experiment(**plain | changes)


KEEPS = fl.LocalTraining(lr=0.05, momentum=0.9, reset=False, batch_size=4)
RUNS: dict[str, dict[str, Any]] = {
    **{
        name: {"algorithm": name}
        for name in ("scaffold", "feddyn", "fedadmm", "admm", "ceadmm", "celiadmm", "liadmm")
    },
    "momentum that is kept": {"local": KEEPS, "algorithm": "fedavgm"},
    "fedadam and clients of their own": {
        "algorithm": "fedadam",
        "clients": fl.Clients(6, 3, holdout=0.3),
    },
    "validation and a twin": {"evaluate": fl.Evaluate(on=("test", "validation"), twin=True)},
    "workers": {"engine": "processes", "algorithm": "scaffold"},
    "stacked": {"engine": "stacked", "algorithm": "fedadmm"},
}


def run_or_resume(experiment: fl.Experiment, folder: Path) -> None:
    if (folder / MANIFEST).exists():
        fl.resume(folder, experiment=experiment)
    else:
        fl.run(experiment, folder)


def of_run(folder: Path) -> dict[str, Any]:
    """All that a run came to, but for how long it took."""
    lines = map(json.loads, (folder / "rounds.jsonl").read_text().splitlines())
    summary = json.loads((folder / "summary.json").read_text())
    told = ("status", "rounds", "final", "best", "emd", "batches", "examples", "bytes_up")
    return {
        "records": [{k: v for k, v in line.items() if "seconds" not in k} for line in lines],
        "summary": {key: summary[key] for key in told},
        **{
            name: (folder / name).read_bytes()
            for name in ("model.safetensors", "evaluation.json", "experiment.toml")
        },
    }


def of_runs(folder: Path) -> dict[str, Any]:
    return {path.parent.name: of_run(path.parent) for path in sorted(folder.rglob(MANIFEST))}


def sweep_job() -> Job:
    points = fl.grid(described(algorithm="fedavgm", engine="stacked"), {}, seeds=3)
    return Job(partial(fl.sweep, points), of_runs)


FILE = """
dataset = "fashion-mnist-mini"
model = "linear"
rounds = 2
engine = "sequential"
evaluate = {{ every = 2 }}
clients = {{ count = 30, per_round = 2 }}
algorithm = "{algorithm}"
"""


def compare_job(place: Path) -> Job:
    """The command, whose page is drawn when the runs are done."""
    from fedlens.cli.run import compare_command

    files = []
    for algorithm in ("fedavg", "scaffold"):
        files.append(place / f"{algorithm}.toml")
        files[-1].write_text(FILE.format(algorithm=algorithm))

    def work(folder: Path) -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            compare_command([str(file) for file in files], seeds=1, out=folder, quiet=True)

    return Job(work, of_runs)


def reproduce_job() -> Job:
    """Two items, which have four of their runs in common."""

    def work(folder: Path) -> None:
        Together(plan_all(["ghaemi/fedavg", "ghaemi/fedadmm"], "smoke", folder, seeds=1)).run()

    return Job(work, of_runs)


def prepare_job(place: Path) -> Job:
    nature = make(place / "nature", {1: 101, 2: 103}, num_val=5)
    name = "inaturalist-user-120k"
    listed = listing(name, nature)

    def of_store(folder: Path) -> Any:
        files = ("manifest.json", "images.u8", "listing.npz")
        assert {path.name for path in folder.iterdir()} == set(files)
        return [(folder / file).read_bytes() for file in files[:2]]

    def work(folder: Path) -> None:
        store.prepare(name, listed, nature, folder, 8)

    return Job(work, of_store)


def job_called(name: str, place: Path) -> Job:
    if name in RUNS:
        return Job(partial(run_or_resume, described(**RUNS[name])), of_run)
    others: dict[str, Callable[[], Job]] = {
        "sweep": sweep_job,
        "compare": partial(compare_job, place),
        "reproduce": reproduce_job,
        "data prepare": partial(prepare_job, place),
    }
    return others[name]()


JOBS = [*RUNS, "sweep", "compare", "reproduce", "data prepare"]
SLOW = ("ceadmm", "celiadmm", "admm", "liadmm", "compare", "reproduce")  # left to the long form


@pytest.mark.parametrize("name", [name for name in JOBS if name not in SLOW])
def test_what_is_killed_twice_and_begun_again_comes_to_the_same(name, tmp_path):
    survives(job_called(name, tmp_path), tmp_path, seed=JOBS.index(name), num_kills=SHORT)


@pytest.mark.long
@pytest.mark.parametrize("name", JOBS)
def test_what_is_killed_many_times_and_begun_again_comes_to_the_same(name, tmp_path):
    survives(job_called(name, tmp_path), tmp_path, seed=100 + JOBS.index(name), num_kills=LONG)
