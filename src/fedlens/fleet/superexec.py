"""Starts Flower's SuperLink of a server, and runs the app of a run on it.

Flower's own `flower-superexec` would start a process for the app, with its token among the
arguments. Here a fork of one process runs it; nobody else sees the token, and Flower and torch are
imported once.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import time
import traceback
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import Queue
from typing import NoReturn

import httpx
from flwr.proto.runtime_pb2 import AcquireTaskRequest
from flwr.supercore.constant import TaskType
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supercore.retry import make_simple_http_retry_invoker
from flwr.supercore.runtime import RuntimeHttpClient

from fedlens.fleet.flower import end_with
from fedlens.fleet.messages import is_busy

LOOK = 0.2  # seconds between two looks for a task
SUPERLINK = """
from flwr.supercore import constant

# Large updates are written to one file: Flower gives up after 5 s in which it cannot be written.
constant.SQLITE_PRAGMAS += (("busy_timeout", "25000"),)

from flwr.superlink.cli import flower_superlink

flower_superlink()
"""
AGAIN = 0.05  # seconds until the rest of a reply is looked for, which is announced before it comes


def do_tasks(address: str, certificates: bytes) -> NoReturn:
    """Run each app that the SuperLink at an address of this machine has, in a fork, for ever."""
    link = RuntimeHttpClient.from_server_address(
        server_address=address,
        insecure=False,
        root_certificates=certificates,
        interceptors=[RuntimeVersionHttpInterceptor(component_name="SuperExec")],
        retry_invoker=make_simple_http_retry_invoker(),
    )
    kind = TaskType.SERVER_APP
    while True:
        with suppress(ChildProcessError):  # there are none
            while os.waitpid(-1, os.WNOHANG)[0]:  # the forks that have ended
                pass
        try:
            found = link.AcquireTask(AcquireTaskRequest(supported_task_types=[kind]))
        except httpx.HTTPStatusError as error:
            if not is_busy(error):
                raise
            time.sleep(LOOK)
            continue
        if found.HasField("task") and found.token and found.task.type == kind:
            importlib.import_module("fedlens.fleet.apps")  # before the fork: it is done once
            if os.fork() == 0:
                _in_fork(address, found.token, certificates)
        time.sleep(LOOK)


def _in_fork(address: str, token: str, certificates: bytes) -> NoReturn:
    """Run one app, then exit: the fork must not continue its parent's work."""
    from flwr.superlink.grid import http_grid
    from flwr.superlink.runtime.run_serverapp import run_serverapp

    # Flower has no setting for it, and waits for a second.
    http_grid.pull_objects = partial(http_grid.pull_objects, initial_backoff=AGAIN)

    end_with(os.getppid())
    status = 1
    try:
        run_serverapp(address, Queue(), token, False, certificates, None, False)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def main(address: str, ca: str, *words: str) -> None:
    """Become Flower's SuperLink, with these arguments; a fork does its tasks."""
    program = os.getpid()
    if os.fork():
        os.execv(sys.executable, [sys.executable, "-P", "-c", SUPERLINK, *words])
    try:
        end_with(program)
        do_tasks(address, Path(ca).read_bytes())
    except BaseException:
        traceback.print_exc()
        os.kill(program, signal.SIGTERM)  # without this process it would never do a task
        os._exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
