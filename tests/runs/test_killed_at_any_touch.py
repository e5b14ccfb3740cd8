"""Runs that are killed at each touch of their folder."""

import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fedlens as fl
from tests.children import fork
from tests.runs.resumable import (
    Stop,
    assert_same_run,
    mindful,
    save_after_every_round,
    set_room,
)

pytestmark = pytest.mark.usefixtures("one_thread", "quick_pages")


def killed(work: Callable[[], object], folder: Path, moment: int) -> bool:
    """Whether a process doing `work` was killed at its nth change of the folder, or got done."""
    child = fork()
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


def test_a_run_killed_at_any_touch_of_its_folder_and_resumed_equals_one_that_was_not(
    tmp_path, monkeypatch
):
    save_after_every_round(monkeypatch)
    # Three, since the third checkpoint removes the first; and little else to do, fifty times.
    experiment = mindful(rounds=3, clients=fl.Clients(2, 1), evaluate=fl.Evaluate(every=3))
    fl.run(experiment, tmp_path / "whole")
    set_room(monkeypatch, 0)  # what clients remember is in files
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
    set_room(monkeypatch, 3)  # client 2 has room in memory, and client 5 has none
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


def test_a_finished_run_that_is_resumed_and_killed_can_be_given_more_rounds(tmp_path):
    experiment = mindful(rounds=2, clients=fl.Clients(6, 1), evaluate=fl.Evaluate(every=1))
    fl.run(experiment, tmp_path / "once")  # it is over soon, so it has one checkpoint
    shutil.copytree(tmp_path / "once", tmp_path / "whole")
    fl.resume(tmp_path / "whole", experiment=experiment, rounds=3)
    run = tmp_path / "run"
    moment = 0
    shutil.copytree(tmp_path / "once", run)
    while killed(lambda: fl.resume(run, experiment=experiment), run, moment := moment + 1):
        fl.resume(run, experiment=experiment, rounds=3)
        assert_same_run(run, tmp_path / "whole")
        shutil.rmtree(run)
        shutil.copytree(tmp_path / "once", run)
    assert moment > 3
