"""Processes that live, have ended or were stopped, as others of the machine see them."""

import os
import signal
from collections.abc import Iterator

import pytest

from fedlens.storage.process_state import is_alive, is_stopped
from tests.children import forked


@pytest.fixture
def child() -> Iterator[int]:
    """A process that waits for a signal; nobody has waited for its end before the test is over."""
    pid = forked(signal.pause)
    yield pid
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def see(pid: int, what: int) -> None:
    """Wait until a child has ended or was stopped, and leave its end to be waited for."""
    os.waitid(os.P_PID, pid, what | os.WNOWAIT)


def test_a_process_lives_until_it_has_ended_though_nobody_has_waited_for_it(child):
    assert is_alive(os.getpid())
    assert is_alive(child) and not is_stopped(child)
    os.kill(child, signal.SIGSTOP)
    see(child, os.WSTOPPED)
    assert is_alive(child) and is_stopped(child)
    os.kill(child, signal.SIGKILL)
    see(child, os.WEXITED)
    assert not is_alive(child), "it is a zombie"


def test_a_process_that_is_gone_does_not_live():
    pid = forked(lambda: None)
    os.waitpid(pid, 0)
    assert not is_alive(pid)


def test_a_process_of_another_user_lives(child, monkeypatch):
    def refuse(pid: int, sign: int) -> None:
        raise PermissionError

    with monkeypatch.context() as patched:
        patched.setattr(os, "kill", refuse)
        assert is_alive(child)
