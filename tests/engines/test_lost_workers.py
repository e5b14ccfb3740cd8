"""Workers that are killed, stopped or interrupted: others train their clients."""

import os
import signal
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from fedlens.algorithm.pieces.upload import difference
from fedlens.core import Upload
from fedlens.engines import gpus, processes
from fedlens.engines.workers import TRIES
from fedlens.rounds import run_round
from fedlens.storage.process_state import is_stopped
from tests.children import in_a_child
from tests.federations import CPU, assert_equal, forked
from tests.papers_under_test import BASE


@pytest.mark.parametrize("options", [{"workers": 2}, {"devices": [CPU] * 2}])
@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP])
def test_a_worker_that_dies_or_stands_still_is_replaced_and_the_round_comes_to_the_same(
    options, sign, monkeypatch, caplog
):
    monkeypatch.setattr(processes, "LOOK_SECONDS", 0.05)
    engine, program, federation, state = forked(BASE, **options)
    try:
        expected, _ = run_round(program, federation, engine, state, seed=0)
        os.kill(engine.workers[0].process.pid, sign)
        with caplog.at_level("WARNING", "fedlens"):
            found, _ = run_round(program, federation, engine, state, seed=0)
        assert_equal(found=found.params, expected=expected.params)
        assert caplog.messages == [
            "a worker process was killed or stopped: another trains its clients"
        ]
    finally:
        engine.close()


def test_much_can_be_sent_to_a_worker_that_stands_still(monkeypatch):
    monkeypatch.setattr(processes, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(processes, "BUFFERED", 0)
    engine, program, federation, state = forked(BASE, workers=2)
    try:
        expected, _ = run_round(program, federation, engine, state, seed=0)
        stopped = engine.workers[0].process.pid
        os.kill(stopped, signal.SIGSTOP)
        while not is_stopped(stopped):
            time.sleep(0.01)
        found, _ = run_round(program, federation, engine, state, seed=0)
        assert_equal(found=found.params, expected=expected.params)
        assert engine.workers[0].process.pid != stopped
    finally:
        engine.close()


def interrupted_fork() -> None:
    os.register_at_fork(after_in_parent=lambda: os.kill(os.getpid(), signal.SIGINT))
    try:
        gpus.in_a_child(os.getpid)
    except KeyboardInterrupt:
        sys.exit(7)


def test_ctrl_c_is_not_lost_while_a_worker_is_forked():
    """In a process of its own: what is called after a fork can never be taken back."""
    assert in_a_child(interrupted_fork) == (7, "", "")


def test_a_pool_whose_workers_stand_still_can_be_closed():
    engine, program, federation, state = forked(BASE, workers=2)
    run_round(program, federation, engine, state, seed=0)
    started = [worker.process for worker in engine.workers]
    for process in started:
        os.kill(process.pid, signal.SIGSTOP)
    engine.close()
    assert not any(process.is_alive() for process in started)


@dataclass(frozen=True)
class DiesInItsTask:
    """upload: a client over which its worker is killed, every time or as often as is said."""

    marks: Path
    times: int

    def __call__(self, local) -> Upload:
        if len(list(self.marks.iterdir())) < self.times:
            (self.marks / str(os.getpid())).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return difference(local)


@pytest.mark.parametrize("times", [2, 1000])
def test_a_task_that_kills_its_worker_is_tried_again_but_not_for_ever(tmp_path, times):
    dying = replace(BASE, upload=DiesInItsTask(tmp_path, times))
    engine, program, federation, state = forked(dying, workers=1)
    try:
        if times > TRIES:
            with pytest.raises(ChildProcessError, match="killed 3 times"):
                run_round(program, federation, engine, state, seed=0)
            return
        found, _ = run_round(program, federation, engine, state, seed=0)
    finally:
        engine.close()
    engine, program, federation, state = forked(BASE, workers=1)
    expected, _ = run_round(program, federation, engine, state, seed=0)
    engine.close()
    assert_equal(found=found.params, expected=expected.params)
