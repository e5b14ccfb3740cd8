import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fedlens as fl
from fedlens.runs.summary import Record
from tests.toys import toy

# typer 0.20 asks click for names that click is about to drop.
pytestmark = [
    pytest.mark.filterwarnings("ignore:'click.utils:DeprecationWarning"),
    pytest.mark.usefixtures("quick_pages"),
]


@pytest.fixture(autouse=True)
def one_thread(monkeypatch) -> Iterator[None]:
    """What is compared byte for byte is computed alike here and in other processes."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def normed() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        layers = (nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten())
        return nn.Sequential(*layers, nn.Linear(8, 3))


def forgetful(**changes: Any) -> fl.Experiment:
    """FedAvg, which remembers nothing but the model."""
    plain: dict[str, Any] = {"dataset": toy(), "model": normed(), "rounds": 4}
    clients = fl.Clients(count=6, per_round=3, holdout=0.2)
    plain |= {"engine": "sequential", "clients": clients}
    return fl.Experiment(**plain | changes)


def mindful(**changes: Any) -> fl.Experiment:
    """Everything that can be remembered: by the server, by solvers, in layers of clients' own."""
    local = fl.LocalTraining(lr=0.05, momentum=0.9, reset=False, batch_size=4)
    return forgetful(algorithm="fedavgm", local=local, norm="local", **changes)


def records(folder: Path) -> list[Record]:
    """What a run recorded, but for how long it took."""
    lines = map(json.loads, (folder / "rounds.jsonl").read_text().splitlines())
    return [{k: v for k, v in line.items() if not k.endswith("seconds")} for line in lines]


def assert_same_run(found: Path, expected: Path) -> None:
    assert records(found) == records(expected)
    models = [(folder / "model.safetensors").read_bytes() for folder in (found, expected)]
    assert models[0] == models[1]
    ours, theirs = (json.loads((f / "summary.json").read_text()) for f in (found, expected))
    told = ("status", "rounds", "final", "best", "emd", "bytes_up", "bytes_down")
    assert {key: ours[key] for key in told} == {key: theirs[key] for key in told}
    assert ours["seconds"]["total"] >= ours["seconds"]["training"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, None])
def test_no_worker_outlives_a_run_however_it_ends(tmp_path, error):
    experiment = forgetful(engine="processes")
    seen = []

    def look(record: Record) -> None:
        seen.append(len(multiprocessing.active_children()))
        if error and record["round"] == 2:
            raise error

    with pytest.raises(error) if error else nullcontext():
        fl.run(experiment, tmp_path / "run", watch=look)
    assert min(seen) > 0
    assert not multiprocessing.active_children()


class Stop:
    """A watch that raises something after some round."""

    def __init__(self, round: int, error: type[BaseException] = KeyboardInterrupt) -> None:
        self.round, self.error = round, error

    def __call__(self, record: Record) -> None:
        if record["round"] == self.round:
            raise self.error


@pytest.mark.parametrize("describe", [forgetful, mindful])
@pytest.mark.parametrize("engine", ["sequential", "stacked", "processes"])
def test_a_run_stopped_twice_and_resumed_equals_one_that_was_not(tmp_path, describe, engine):
    experiment = describe(engine=engine)
    fl.run(experiment, tmp_path / "whole")
    run = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        fl.run(experiment, run, watch=Stop(1))
    assert json.loads((run / "summary.json").read_text())["status"] == "interrupted"
    assert len(records(run)) == 1
    with pytest.raises(KeyboardInterrupt):
        fl.resume(run, experiment=experiment, watch=Stop(3))
    result = fl.resume(run, experiment=experiment)
    assert [record["round"] for record in result.records] == [1, 2, 3, 4]
    assert_same_run(run, tmp_path / "whole")


def killed(work: Callable[[], object], folder: Path, moment: int) -> bool:
    """Whether a process doing `work` was killed at its nth change of the folder, or got done."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking beside threads
        child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
        return os.WIFSIGNALED(status)
    touched = 0

    def count(event: str, about: tuple[Any, ...]) -> None:
        nonlocal touched
        changes = event in ("os.rename", "os.remove", "os.mkdir", "os.truncate")
        if changes or (event == "open" and about[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)):
            touched += str(about[0]).startswith(str(folder))
            if touched == moment:
                os.kill(os.getpid(), signal.SIGKILL)

    try:
        sys.addaudithook(count)
        work()
        os._exit(0)
    finally:
        os._exit(1)


def save_after_every_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedlens.runs.active.CHECKPOINT_SECONDS", 0.0)
    monkeypatch.setattr("fedlens.runs.active.SAVING_SHARE", 1.0)


def test_a_run_killed_at_any_touch_of_its_folder_and_resumed_equals_one_that_was_not(
    tmp_path, monkeypatch
):
    save_after_every_round(monkeypatch)
    # Three, since the third checkpoint removes the first; and little else to do, fifty times.
    experiment = mindful(rounds=3, clients=fl.Clients(6, 1), evaluate=fl.Evaluate(every=3))
    fl.run(experiment, tmp_path / "whole")
    run = tmp_path / "run"
    moment = num_resumed = 0
    while killed(lambda: fl.run(experiment, run), run, moment := moment + 1):
        if not (run / "manifest.json").exists():
            with pytest.raises(ValueError, match="is not a run"):
                fl.resume(run, experiment=experiment)
        else:
            fl.resume(run, experiment=experiment)
            assert_same_run(run, tmp_path / "whole")
            num_resumed += 1
        shutil.rmtree(run, ignore_errors=True)
    assert num_resumed > 25


def test_a_resumed_run_may_be_killed_at_any_touch_too(tmp_path, monkeypatch):
    save_after_every_round(monkeypatch)
    experiment = mindful(rounds=2, clients=fl.Clients(6, 1), evaluate=fl.Evaluate(every=2))
    fl.run(experiment, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        fl.run(experiment, tmp_path / "stopped", watch=Stop(1))
    run = tmp_path / "run"
    moment = 0
    shutil.copytree(tmp_path / "stopped", run)
    while killed(lambda: fl.resume(run, experiment=experiment), run, moment := moment + 1):
        fl.resume(run, experiment=experiment)
        assert_same_run(run, tmp_path / "whole")
        shutil.rmtree(run)
        shutil.copytree(tmp_path / "stopped", run)
    assert moment > 10


def test_a_run_killed_before_its_first_checkpoint_starts_again(tmp_path):
    experiment = mindful()
    fl.run(experiment, tmp_path / "whole")
    run = tmp_path / "run"
    shutil.copytree(tmp_path / "whole", run)
    for name in ("checkpoint", "model.safetensors", "summary.json"):
        path = run / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    fl.resume(run, experiment=experiment)
    assert_same_run(run, tmp_path / "whole")


@pytest.mark.parametrize("torn", ['{"round": 3, "train_l', "{", '{"round": 3}\n{"rou', "\n"])
def test_a_torn_last_line_is_dropped(tmp_path, torn):
    experiment = forgetful()
    fl.run(experiment, tmp_path / "whole")
    run = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        fl.run(experiment, run, watch=Stop(2))
    with (run / "rounds.jsonl").open("a") as file:
        file.write(torn)
    fl.resume(run, experiment=experiment)
    assert_same_run(run, tmp_path / "whole")


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize("local", [fl.LocalTraining(), fl.LocalTraining(lr=1e30)])
def test_resuming_a_run_that_ended_changes_nothing(tmp_path, local):
    experiment = forgetful(local=local, evaluate=fl.Evaluate(every=3))
    first = fl.run(experiment, tmp_path / "run")
    before = contents(tmp_path / "run")
    again = fl.resume(tmp_path / "run", experiment=experiment)
    assert again.status == first.status
    assert len(again.records) == len(first.records)
    assert contents(tmp_path / "run") == before


def test_more_rounds_may_be_asked_of_a_run_that_ended(tmp_path):
    fl.run(mindful(rounds=4), tmp_path / "whole")
    fl.run(mindful(rounds=2), tmp_path / "run")
    fl.resume(tmp_path / "run", experiment=mindful(rounds=4))
    assert_same_run(tmp_path / "run", tmp_path / "whole")


def test_other_data_or_another_model_are_refused(tmp_path):
    run = tmp_path / "run"
    fl.run(forgetful(), run)
    before = contents(run)
    fewer = fl.Dataset("toy", toy().train.take(torch.arange(40)), toy().test, ("a", "b", "c"))
    with pytest.raises(ValueError, match="the data are not those it started with"):
        fl.resume(run, experiment=forgetful(dataset=fewer))
    with pytest.raises(ValueError, match=r"was begun with model = '<Sequential: .*, not 'linear'"):
        fl.resume(run, experiment=forgetful(model="linear"))
    other = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
    with pytest.raises(ValueError, match="was run with another model: put the old one back"):
        fl.resume(run, experiment=forgetful(model=other))
    with pytest.raises(ValueError, match="was given from Python"):
        fl.resume(run)
    assert contents(run) == before


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
# forks them has made one, to see that the model can be trained.
HELD = """
import time
from dataclasses import replace
from pathlib import Path

from fedlens import paper

HOLD = Path(__file__).with_name("hold")
steps = 0

def waiting(local):
    global steps
    steps += 1
    while steps > 6 and HOLD.exists():
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
    strict = ["-W", "error", "-W", "ignore::DeprecationWarning:typer"]
    command = [sys.executable, *strict, "-c", "from fedlens.cli.main import main; main()"]
    signs = {"killed": signal.SIGKILL, "stopped": signal.SIGINT}
    processes = {}
    for name in signs:
        words = ["run", "a.toml", "--out", f"runs/{name}"]
        with Path(f"{name}.err").open("w") as err:
            processes[name] = subprocess.Popen(
                [*command, *words], stdout=err, stderr=err, start_new_session=True
            )

    def is_well_under_way(name: str) -> bool:
        rounds: Path = tmp_path / "runs" / name / "rounds.jsonl"
        return rounds.exists() and rounds.read_text().count("\n") >= 2

    waiting = set(signs)
    while waiting:
        assert eventually(lambda: any(map(is_well_under_way, waiting)))
        name = next(filter(is_well_under_way, waiting))
        waiting.remove(name)
        assert len(group_members(processes[name].pid)) > 1
        processes[name].send_signal(signs[name])
    statuses = {name: process.wait(300) for name, process in processes.items()}
    assert statuses == {"killed": -signal.SIGKILL, "stopped": 130}
    pids = [process.pid for process in processes.values()]
    assert eventually(lambda: not any(map(group_members, pids)))
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
        "nowhere": "cannot read the experiment nowhere/experiment.toml",
        "empty": "cannot read the experiment empty/experiment.toml",
        "a.toml": "cannot read the experiment a.toml/experiment.toml",
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


def test_a_run_with_code_of_ones_own_can_be_run_again_from_anywhere(tmp_path):
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    home.mkdir(), elsewhere.mkdir()
    (home / "my_split_of_mine.py").write_text(
        "import torch\n"
        "from fedlens import Holdings\n"
        "def halves(examples, num_classes, num_clients, rng):\n"
        "    return Holdings.of(list(torch.arange(len(examples)).chunk(num_clients)))\n"
    )
    (home / "a.toml").write_text(
        'dataset = "fashion-mnist-mini"\nmodel = "linear"\nrounds = 1\nengine = "sequential"\n'
        '[clients]\ncount = 2\npartition = "my_split_of_mine:halves"\n'
    )
    for folder, file in ((home, "a.toml"), (elsewhere, "../home/first/experiment.toml")):
        out = "first" if folder == home else "second"
        command = [sys.executable, "-m", "fedlens", "run", file, "--out", out, "-q"]
        subprocess.run(command, cwd=folder, check=True, capture_output=True)
    first, second = home / "first" / "model.safetensors", elsewhere / "second" / "model.safetensors"
    assert first.read_bytes() == second.read_bytes()
