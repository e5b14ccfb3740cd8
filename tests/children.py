"""Processes that are forked from this one, with all that takes seconds to import."""

from __future__ import annotations

import gc
import os
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import IO

import pytest
import torch

from tests.command_line import Ended


def fork() -> int:
    """As `os.fork`; the child leaves alone what this process has left over, as workers do."""
    gc.disable()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking beside threads
        child = os.fork()
    if not child:
        gc.freeze()
        torch.set_num_threads(1)  # those of the parent are not there any more
    gc.enable()
    return child


def forked(work: Callable[[], object], *outputs: IO[bytes]) -> int:
    """A process group of its own that does the work, and ends as a program would.

    `outputs`, if given, are where what it prints goes, and then its errors.
    """
    if sys.platform != "linux":
        pytest.skip("forks")
    child = fork()
    if child:
        with suppress(OSError):  # the child does it, too: whoever is first
            os.setpgid(child, child)
        return child
    status = 1
    try:
        os.setpgid(0, 0)
        for number, file in enumerate(outputs, 1):
            os.dup2(file.fileno(), number)
        sys.stdout, sys.stderr = (
            open(number, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
            for number in (1, 2)
        )
        status = _status(work)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)


def _status(work: Callable[[], object]) -> int:
    try:
        work()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def status_of(child: int) -> int:
    """What a child ends with; a signal is a negative number."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def in_a_child(work: Callable[[], object]) -> Ended:
    """What work ends with and prints, in a process of its own."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        status = status_of(forked(work, out, err))
        out.seek(0), err.seek(0)
        return Ended(status, out.read().decode(), err.read().decode())


def command(*words: object) -> None:
    """The command, to be run in a child."""
    from fedlens.cli import main as cli

    sys.argv = ["fedlens", *map(str, words)]
    cli.main()
