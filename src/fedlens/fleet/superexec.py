"""The program that the SuperNode of a site starts instead of Flower's `flower-superexec`.

Flower would start a new process for each message, which installs the app that the server sent and
runs it. Here a fork of this process answers each message with the app of the installed Fedlens: no
code from the server is run, and Flower and torch are imported once.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from pathlib import Path
from typing import Any, NoReturn

from flwr.supercore.cli import flower_superexec
from flwr.supercore.constant import TaskType
from flwr.supercore.superexec import run_superexec as superexec
from flwr.supercore.superexec.executor import ExecutionSpec, LaunchResult
from flwr.supercore.tls import validate_and_resolve_root_certificates
from flwr.supernode.runtime import run_clientapp as runtime

from fedlens.fleet.flower import end_with


class Forks:
    """An executor, in Flower's terms: it answers messages and accepts no other kind of task."""

    def get_eligible_capacity(
        self, supported_task_types: set[TaskType], **_: Any
    ) -> tuple[set[TaskType], set[str]]:
        return {TaskType.CLIENT_APP}, set()

    def wait_for_capacity(self, *_: Any, **__: Any) -> None:
        return None

    def launch(self, spec: ExecutionSpec) -> LaunchResult:
        if spec.task_type != TaskType.CLIENT_APP:
            return LaunchResult.failed("this site runs no app of its server")
        # Imported before the fork, so that it is done once; and only when there is a message, since
        # a SuperNode that is refused starts this program as well.
        importlib.import_module("fedlens.fleet.apps")
        if os.fork() == 0:
            _answer(spec)
        return LaunchResult.accepted()

    def reconcile(self) -> None:
        """Reap the forks that have ended."""
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:  # there are no children
            return

    def close(self) -> None:
        return None


def _answer(spec: ExecutionSpec) -> NoReturn:
    """Answer one message in the fork, then exit: the fork must not continue its parent's work."""
    status = 1
    try:
        runtime.run_clientapp(
            runtime_api_address=spec.runtime_api_address,
            token=spec.token,
            insecure=spec.insecure,
            certificates=validate_and_resolve_root_certificates(
                spec.root_certificates_path, spec.insecure
            ),
            parent_pid=spec.parent_pid,
            runtime_dependency_install=False,
        )
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _installs_nothing(*_: Any, **__: Any) -> None:
    return None


def _no_folder(*_: Any, **__: Any) -> Path:
    return Path()


def _load_ours(*_: Any, **__: Any) -> Any:
    def load(*_: Any, **__: Any) -> Any:
        from fedlens.fleet.apps import client_app

        return client_app()

    return load


def _forks(*_: Any, **__: Any) -> Forks:
    return Forks()


REPLACED = (
    (superexec, "get_executor", _forks),
    (superexec, "start_parent_process_monitor", end_with),
    (runtime, "start_parent_process_monitor", end_with),
    (runtime, "install_from_fab", _installs_nothing),
    (runtime, "get_project_dir", _no_folder),
    (runtime, "get_load_client_app_fn", _load_ours),
)
"""Flower's functions that start, end, install and load apps, and their replacements."""


def main() -> None:
    for module, name, ours in REPLACED:
        if not hasattr(module, name):
            sys.exit(f"this Flower starts apps in another way ({name}): install flwr 1.41")
        setattr(module, name, ours)
    sys.argv[0] = "flower-superexec"
    flower_superexec()


if __name__ == "__main__":
    main()
