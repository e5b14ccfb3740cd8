"""Starts Flower's SuperNode of a site or SuperLink of a server, and runs the tasks that it has.

Flower's own `flower-superexec` would start a process for each task, with its token among the
arguments, which installs the app that came with the task and runs it. Here a fork of one process
does a task; nobody else sees its token, and Flower and torch are imported once. A site answers
messages with the app of the installed Fedlens, and does nothing else: the app that the server sent
is received, and never unpacked.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from queue import Queue
from typing import Any, NoReturn

from flwr.app import Message
from flwr.app.error import Error
from flwr.common.constant import ErrorCode, SubStatus
from flwr.proto.runtime_pb2 import AcquireTaskRequest
from flwr.supercore.constant import TaskType
from flwr.supercore.heartbeat import HeartbeatSender, make_task_heartbeat_fn_http
from flwr.supercore.interceptors import (
    RuntimeTokenHttpInterceptor,
    RuntimeVersionHttpInterceptor,
)
from flwr.supercore.retry import make_simple_http_retry_invoker
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supernode.runtime.run_clientapp import pull_task_input, push_message, push_task_output

from fedlens.fleet.flower import end_with

LOOK = 0.2  # seconds between two looks for a task
Task = Callable[[str, str, bytes | None], None]  # address, token, certificates


def client(address: str, certificates: bytes | None, *more: Any) -> RuntimeHttpClient:
    """A client for the tasks of the SuperNode or SuperLink at an address of this machine."""
    return RuntimeHttpClient.from_server_address(
        server_address=address,
        insecure=certificates is None,
        root_certificates=certificates,
        interceptors=[RuntimeVersionHttpInterceptor(component_name="SuperExec"), *more],
        retry_invoker=make_simple_http_retry_invoker(),
    )


def answer(address: str, token: str, certificates: bytes | None) -> None:
    """Answer one message of a server."""
    from fedlens.fleet.apps import client_app

    link = client(address, certificates, RuntimeTokenHttpInterceptor(token))
    HeartbeatSender(make_task_heartbeat_fn_http(link)).start()
    message, context, *_ = pull_task_input(link)
    status, details = SubStatus.COMPLETED, ""
    try:
        reply = client_app()(message=message, context=context)
    except Exception as error:
        traceback.print_exc()
        status, details = SubStatus.FAILED, f"{type(error)}:<'{error}'>"
        failed = Error(code=ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason=details)
        reply = Message(failed, reply_to=message)
    push_message(link, reply, context)
    push_task_output(link, context, status, details)


def run(address: str, token: str, certificates: bytes | None) -> None:
    """Run the app that a server sent to its own SuperLink."""
    from flwr.superlink.runtime.run_serverapp import run_serverapp

    run_serverapp(address, Queue(), token, certificates is None, certificates, None, False)


TASKS: dict[str, tuple[TaskType, Task]] = {
    "flower-supernode": (TaskType.CLIENT_APP, answer),
    "flower-superlink": (TaskType.SERVER_APP, run),
}
"""The only kind of task that each of Flower's programs gets done here, and how."""


def do_tasks(program: str, address: str, certificates: bytes | None) -> NoReturn:
    """Do each task of a program in a fork, for ever."""
    kind, do = TASKS[program]
    link = client(address, certificates)
    while True:
        with suppress(ChildProcessError):  # there are none
            while os.waitpid(-1, os.WNOHANG)[0]:  # the forks that have ended
                pass
        found = link.AcquireTask(AcquireTaskRequest(supported_task_types=[kind]))
        if found.HasField("task") and found.token and found.task.type == kind:
            # Imported before the fork, so that it is done once; and only when there is a task,
            # since a SuperNode that is refused has this process as well.
            importlib.import_module("fedlens.fleet.apps")
            if os.fork() == 0:
                _in_fork(do, address, found.token, certificates)
        time.sleep(LOOK)


def _in_fork(do: Task, *task: Any) -> NoReturn:
    """Do one task, then exit: the fork must not continue its parent's work."""
    end_with(os.getppid())
    status = 1
    try:
        do(*task)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def main(address: str, ca: str, log: str, *command: str) -> None:
    """Become Flower's program; a fork does its tasks, and writes to `log`."""
    program = os.getpid()
    if os.fork():
        os.execv(command[0], command)
    try:
        end_with(program)
        out = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        for stream in (1, 2):
            os.dup2(out, stream)
        do_tasks(Path(command[0]).name, address, Path(ca).read_bytes() if ca else None)
    except BaseException:
        traceback.print_exc()
        os.kill(program, signal.SIGTERM)  # without this process it would never do a task
        os._exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
