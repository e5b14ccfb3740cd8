"""The command `resume`, after runs in processes of their own."""

import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.children import command, forked, status_of
from tests.command_line import forget_modules_of
from tests.runs.resumable import assert_same_run, contents, records

# typer 0.20 asks click for names that click is about to drop.
pytestmark = [
    pytest.mark.filterwarnings("ignore:'click.utils:DeprecationWarning"),
    pytest.mark.usefixtures("one_thread", "quick_pages"),
]


EXPERIMENT = """
dataset = "fashion-mnist-mini"
model = "linear"
rounds = 8
evaluate = { every = 8 }
engine = "processes"
clients = { count = 60, per_round = 2 }
local = { lr = 0.05, momentum = 0.9, reset = false, batch_size = 1000 }
algorithm = ["fedavgm", "held_by_a_file:held"]
"""

# A client takes one step. So two rounds are over before any worker makes its sixth, even if it
# trains all clients; and not all eight, even if each of two workers makes five. The process that
# forks them makes some, to try the algorithm, which do not count.
HELD = """
import os
import time
from dataclasses import replace
from pathlib import Path

from fedlens import paper

HOLD = Path(__file__).with_name("hold")
FORKS = os.getpid()
steps = 0

def waiting(local):
    global steps
    steps += os.getpid() != FORKS
    while steps > 5 and HOLD.exists():
        time.sleep(0.01)
    return 0.0 * next(iter(local.params.values())).flatten(1).sum(1)

@paper
def held(base):
    return replace(base, objective=base.objective.plus(waiting))
"""


def group_members(group: int) -> list[int]:
    """The processes of a group that are still at work."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except (OSError, IndexError):
            continue
        if entry.name.isdigit() and int(fields[2]) == group and fields[0] not in "ZX":
            found.append(int(entry.name))
    return found


def eventually(fact: Callable[[], bool], seconds: float = 300) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if fact():
            return True
        time.sleep(0.02)
    return False


def fedlens(monkeypatch, *words: str) -> int:
    from fedlens.cli import main as cli

    monkeypatch.setattr(sys, "argv", ["fedlens", *words])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert isinstance(ended.value.code, int)
    return ended.value.code


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
def test_a_command_that_is_killed_or_interrupted_can_be_resumed_and_leaves_no_workers(
    tmp_path, monkeypatch, capfd
):
    handler = signal.getsignal(signal.SIGTERM)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "held_by_a_file", raising=False)
    Path("a.toml").write_text(EXPERIMENT)
    Path("held_by_a_file.py").write_text(HELD)
    Path("hold").touch()
    signs = {"killed": signal.SIGKILL, "stopped": signal.SIGINT}
    processes = {}
    for name in signs:
        run = partial(command, "run", "a.toml", "--out", f"runs/{name}")
        with Path(f"{name}.err").open("wb") as err:
            processes[name] = forked(run, err, err)

    def is_well_under_way(name: str) -> bool:
        rounds: Path = tmp_path / "runs" / name / "rounds.jsonl"
        return rounds.exists() and rounds.read_text().count("\n") >= 2

    waiting = set(signs)
    while waiting:
        assert eventually(lambda: any(map(is_well_under_way, waiting)))
        name = next(filter(is_well_under_way, waiting))
        waiting.remove(name)
        assert len(group_members(processes[name])) > 1
        os.kill(processes[name], signs[name])
    statuses = {name: status_of(process) for name, process in processes.items()}
    assert statuses == {"killed": -signal.SIGKILL, "stopped": 130}
    assert eventually(lambda: not any(map(group_members, processes.values())))
    assert all(len(records(tmp_path / "runs" / name)) < 8 for name in signs)
    Path("hold").unlink()

    said = Path("stopped.err").read_text()
    assert "Traceback" not in said
    hint = "fedlens: stopped; go on with: fedlens "
    assert hint in said
    words = said.partition(hint)[2].split()
    assert words == ["resume", "runs/stopped"]
    assert fedlens(monkeypatch, *words, "-q") == 0
    assert fedlens(monkeypatch, "resume", "runs/killed") == 0
    assert fedlens(monkeypatch, "run", "a.toml", "--out", "runs/whole", "-q") == 0
    for name in signs:
        assert_same_run(tmp_path / "runs" / name, tmp_path / "runs" / "whole")
    assert "round 8/8" in capfd.readouterr().err
    signal.signal(signal.SIGTERM, handler)


def test_a_run_that_cannot_be_resumed_gets_one_line_and_is_left_alone(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    Path("a.toml").write_text(EXPERIMENT)
    words = ["rounds=1", "engine=sequential", "algorithm=fedavg"]
    assert fedlens(monkeypatch, "run", "a.toml", *words, "--out", "run", "-q") == 0
    capsys.readouterr()
    checkpoint = tmp_path / "run" / "checkpoint"
    (state,) = checkpoint.glob("*.safetensors")
    Path("empty").mkdir()
    cases = {
        "nowhere": "nowhere is not a run folder: there is no such folder; name one",
        "empty": "empty is not a run folder: ",
        "a.toml": "a.toml is not a run folder: ",
    }
    for place, message in cases.items():
        assert fedlens(monkeypatch, "resume", place) == 2
        assert capsys.readouterr().err.startswith(f"fedlens: {message}")
    for path in (state, state.with_suffix(".json"), tmp_path / "run" / "manifest.json"):
        whole = path.read_bytes()
        path.write_bytes(whole[: len(whole) // 2])
        before = contents(tmp_path)
        assert fedlens(monkeypatch, "resume", "run") == 2
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        assert f"{path.name} cannot be read (" in err
        assert contents(tmp_path) == before
        path.write_bytes(whole)
    assert fedlens(monkeypatch, "resume", "run", "-q") == 0


def test_a_run_with_code_of_ones_own_can_be_run_again_from_anywhere(tmp_path, monkeypatch):
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    home.mkdir(), elsewhere.mkdir()
    (home / "my_split_of_mine.py").write_text(
        "import torch\n"
        "from fedlens import Holdings\n"
        "def halves(pool):\n"
        "    return Holdings.of(list(torch.arange(len(pool.examples)).chunk(pool.num_clients)))\n"
    )
    (home / "a.toml").write_text(
        'dataset = "fashion-mnist-mini"\nmodel = "linear"\nrounds = 1\nengine = "sequential"\n'
        '[clients]\ncount = 2\npartition = "my_split_of_mine:halves"\n'
    )
    for folder, file in ((home, "a.toml"), (elsewhere, "../home/first/experiment.toml")):
        out = "first" if folder == home else "second"
        monkeypatch.chdir(folder)
        assert fedlens(monkeypatch, "run", file, "--out", out, "-q") == 0
        forget_modules_of(home)
    first, second = home / "first" / "model.safetensors", elsewhere / "second" / "model.safetensors"
    assert first.read_bytes() == second.read_bytes()
