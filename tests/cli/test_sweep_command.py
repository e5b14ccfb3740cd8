"""`fedlens sweep`, as people call it."""

import itertools
import json
import logging
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from fedlens.runs.folder import Records
from tests.children import forked, status_of
from tests.command_line import only_line

# typer 0.20 asks click for names that click is about to drop.
pytestmark = pytest.mark.filterwarnings("ignore:'click.utils:DeprecationWarning")

EXPERIMENT = """
dataset = "fashion-mnist-mini"
model = "linear"
rounds = 2
engine = "stacked"

[clients]
count = 60
per_round = 3

[local]
lr = 0.05
"""


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch, quick_pages):
    handler = signal.getsignal(signal.SIGTERM)
    monkeypatch.delenv("FEDLENS_DATA", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(tmp_path)
    Path("a.toml").write_text(EXPERIMENT)
    yield
    signal.signal(signal.SIGTERM, handler)


@pytest.fixture
def sweep(monkeypatch, capsys):
    """The command, in this process."""
    from fedlens.cli import main as cli

    def command(*words):
        monkeypatch.setattr(sys, "argv", ["fedlens", "sweep", *words])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return ended.value.code, *capsys.readouterr()

    return command


def records(folder):
    lines = (folder / "rounds.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if "seconds" not in k} for line in lines]


def test_a_sweep_from_the_command_line(sweep):
    grid = ("--grid", "local.lr=0.01,0.1", "--grid", "local.momentum=0.0,0.9", "--seeds", "2")
    status, out, err = sweep("a.toml", "rounds=1", *grid, "--out", "s")
    assert status == 0
    folders = sorted(path.name for path in Path("s").iterdir() if path.is_dir())
    assert len(folders) == 8 + 1 and "figures" in folders  # and the picture of them all
    assert Path("s/report.html").exists()
    assert "lr=0.1,momentum=0.9,seed=1" in folders
    assert "s: 8 points in one stack, up to 8 side by side on cpu\n" in err
    assert "s: round 8/8  lr=0.1,momentum=0.9,seed=1  train loss" in err
    assert out.count("finished") == 8
    means = out.partition("final test accuracy")[2]
    assert means.count(" ± ") == 4 + 1 and "\nbest:   " in out  # means, and the best of them
    assert "over 2 seeds\n" in out
    chosen = Path("s/lr=0.1,momentum=0.9,seed=1/experiment.toml").read_text()
    assert "lr = 0.1" in chosen and "seed = 1" in chosen

    status, out, err = sweep("a.toml", "rounds=1", *grid, "--out", "s", "--json")
    assert status == 0
    assert [summary["status"] for summary in json.loads(out).values()] == ["finished"] * 8
    assert err == "s: all 8 points are done\n"


def test_values_may_be_words_and_the_folder_has_a_name_of_its_own(sweep):
    status, _, err = sweep("a.toml", "--grid", "algorithm=fedavg,fedir", "--quiet")
    assert (status, err) == (0, "")
    folders = {path.name for path in Path("runs/a-sweep").iterdir()}
    assert folders == {"algorithm=fedavg", "algorithm=fedir", "report.html", "figures"}


def test_algorithms_with_options_are_called_by_their_names_in_a_list_too(sweep):
    axis = 'algorithm={name="fedprox",mu=0.1},["fedavgm",{name="fedprox",mu=1.0}]'
    assert sweep("a.toml", "rounds=1", "--grid", axis, "--out", "s", "-q")[0] == 0
    folders = {path.name for path in Path("s").iterdir() if "=" in path.name}
    assert folders == {"algorithm=fedprox-mu-0.1", "algorithm=fedavgm-fedprox-mu-1.0"}


def test_divergence_is_said_and_counts_if_nothing_else_is_left(sweep):
    bad = "local.weight_decay=1e30"
    status, _, err = sweep("a.toml", "--grid", f"{bad},0", "--out", "s", "-q")
    assert status == 0
    assert only_line(err, "weight_decay=1e+30")
    status, out, _ = sweep("a.toml", "--grid", bad, "--out", "s", "-q", "--json")
    assert status == 3
    assert json.loads(out)["weight_decay=1e+30"]["status"] == "diverged"


def test_points_whose_model_gives_every_image_the_same_class_are_named(sweep, monkeypatch):
    monkeypatch.setattr("fedlens.runs.summary._is_constant", lambda _: True)
    status, _, err = sweep("a.toml", "rounds=1", "--grid", "local.lr=0.1,0.2", "--out", "s", "-q")
    line = "fedlens: in 2 of 2 points the model gives every image the same class: lr=0.1 lr=0.2\n"
    assert (status, err) == (0, line)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "a sweep needs values to go through: give a grid (--grid)"),
        (["--grid", "local.lr"], "'local.lr' is not an axis of a grid: write key=value,value"),
        (["--grid", "local.lr=fast,slow"], "local.lr is 'fast': expected a number"),
        (
            ["local.lr=0.1,0.2", "--seeds", "2"],
            "(to go through several values: --grid local.lr=0.1,0.2)",
        ),
        (
            ["--grid", "local.lr=0.1", "--grid", "local.lr=0.2"],
            "local.lr has two grids: give all its values in one, local.lr=A,B",
        ),
        (
            ["local.lr=0.3", "--grid", "local.lr=0.1,0.2"],
            "local.lr=0.3 is for all points, but local.lr has a grid: leave one out",
        ),
        (
            ["--grid", "algorithm=fedprox,fedavg", "--grid", "algorithm.fedprox.mu=0.1"],
            "put algorithm=fedprox before it (point algorithm=fedavg,mu=0.1)",
        ),
        (["--grid", "clients.per_round=3,61"], "choose 1 to 60 (point per_round=61)"),
        (["--seeds", "2", "--out", "a.toml"], "a.toml is a file: choose a folder for the sweep"),
    ],
)
def test_a_mistake_is_one_line_and_nothing_is_written(sweep, words, message):
    status, out, err = sweep("a.toml", "-q", *words)
    assert status == 2
    assert err.count("\n") == 1 and message in err
    assert out == "" and [path.name for path in Path().iterdir()] == ["a.toml"]


def killed_at(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have this process killed when its points together have recorded so many rounds."""
    append, recorded = Records.append, itertools.count(1)

    def append_or_die(file: Records, record: Mapping[str, Any]) -> None:
        append(file, record)
        if next(recorded) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(Records, "append", append_or_die)


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
@pytest.mark.parametrize("number", [1, 8, 12, 17])  # of 18: also between the points of one round
def test_a_sweep_that_was_killed_goes_on_with_the_same_command(sweep, monkeypatch, number):
    monkeypatch.setattr("fedlens.runs.loop.CHECKPOINT_SECONDS", 0.0)
    monkeypatch.setattr("fedlens.runs.loop.SAVING_SHARE", 1.0)
    words = ("a.toml", "rounds=6", "--seeds", "3", "--out")

    def killed() -> None:
        killed_at(number, monkeypatch)
        sweep(*words, "killed", "-q")

    assert status_of(forked(killed)) == -signal.SIGKILL, "it was over before it was killed"
    lines = [len(records(folder)) for folder in sorted(Path("killed").glob("seed=*/"))]
    assert sum(lines) == number
    status, _, err = sweep(*words, "killed")
    assert status == 0
    saved = (number - 1) // 3  # rounds that all three had behind them
    assert f"round {3 * saved + 1}/18" in err and (saved == 0 or "round 1/18" not in err)
    assert sweep(*words, "whole", "-q")[0] == 0
    for seed in range(3):
        found, expected = (Path(name) / f"seed={seed}" for name in ("killed", "whole"))
        assert len(records(found)) == 6
        assert records(found) == records(expected)
        models = [(folder / "model.safetensors").read_bytes() for folder in (found, expected)]
        assert models[0] == models[1]


def test_what_goes_wrong_once_points_were_run_is_no_mistake_in_the_command(sweep):
    Path("s/.seed=1.new").mkdir(parents=True)
    Path("s/.seed=1.new/notes.txt").write_text("somebody's own")
    words = ("a.toml", "engine=sequential", "rounds=1", "--seeds", "2", "--out", "s", "-q")
    status, _, err = sweep(*words)
    assert status == 1 and "is in the way, and not a run's: move it" in err
    assert json.loads(Path("s/seed=0/summary.json").read_text())["status"] == "finished"


def test_what_is_so_of_every_point_is_said_once_a_command(sweep):
    words = ["a.toml", "rounds=1", "local.optimizer=adam", "--seeds", "2", "--quiet"]
    for out in ("one", "two"):
        status, _, told = sweep(*words, "--out", out)
        assert (status, told.count("local.lr is 0.05, which is SGD's")) == (0, 1)


def test_what_happens_again_is_said_again(fedlens, monkeypatch):
    def told() -> None:
        for _ in range(2):
            logging.getLogger("fedlens.engines").warning("a worker was lost")

    monkeypatch.setattr("fedlens.cli.machine.doctor_command", told)
    assert fedlens("doctor").err == "fedlens: a worker was lost\n" * 2


def test_a_grid_may_set_what_an_override_needs(sweep):
    given = ("a.toml", "rounds=1", "seed=3", "clients.partition=dirichlet")
    grid = ("--grid", "clients.partition.alpha=1.0,10.0", "--seeds", "1", "--out", "s")
    status, _, _ = sweep(*given, *grid)
    assert status == 0
    assert sorted(place.parent.name for place in Path("s").glob("*/experiment.toml")) == [
        "alpha=1.0,seed=3",
        "alpha=10.0,seed=3",
    ]
