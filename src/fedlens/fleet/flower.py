"""The processes of a server and of a site that use Flower, and the app that a server runs."""

from __future__ import annotations

import ctypes
import hashlib
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
import urllib.request
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedlens.fleet import CA, SERVER, SERVER_KEY
from fedlens.storage.files import write_atomically
from fedlens.storage.process_state import is_alive

END_SECONDS = 8.0  # time for a process to end after SIGTERM, before SIGKILL
APP = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "fedlens-fleet"
version = "1.0.0"
description = "An experiment of Fedlens, whose code is that of the installed package"
license = "Apache-2.0"
dependencies = ["fedlens[fleet]"]

[tool.hatch.build.targets.wheel]
packages = ["."]

[tool.flwr.app]
publisher = "fedlens"

[tool.flwr.app.components]
serverapp = "fedlens_fleet.server:app"
clientapp = "fedlens_fleet.client:app"

[tool.flwr.app.config]
job = ""
sites = {sites}
out = "{out}"
overwrite = false
"""
HALF = """\
from pathlib import Path

from fedlens.fleet.apps import {half}_app

app = {half}_app(Path(__file__).parent / "experiment.toml")
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def environment(home: Path) -> dict[str, str]:
    """The environment of Flower's processes: their own folder, no telemetry, no calls elsewhere."""
    return {
        **os.environ,
        "FLWR_HOME": str(home / "flower"),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "PYTHONUNBUFFERED": "1",
    }


def start(
    home: Path, module: str, words: Sequence[object], log: Path, umask: int = -1
) -> subprocess.Popen[bytes]:
    """Start a module of this package, as a process that uses Flower, with these arguments.

    Only this user can read the log. On Linux it ends when this process ends, however that ends.
    """
    with open(log, "ab", opener=_for_this_user) as out:
        return subprocess.Popen(
            [sys.executable, "-m", f"fedlens.fleet.{module}", *map(str, words)],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            env=environment(home),
            umask=umask,
            start_new_session=True,
            preexec_fn=_end_with_parent if sys.platform == "linux" else None,
        )


def _for_this_user(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process that was started here, and the processes of its session."""
    for how in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, how)
        try:
            process.wait(END_SECONDS)
            return
        except subprocess.TimeoutExpired:
            continue


def end_with(process: int) -> None:
    """End this process as soon as another process has ended, even if that one was killed.

    Flower's processes watch each other too, but first try for minutes to reach a dead process.
    """

    def watch() -> None:
        while is_alive(process):
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def write_app(folder: Path, experiment: str, sites: int = 2, out: str = "runs/fleet") -> None:
    """Write a Flower app that runs an experiment: a few lines that call the installed Fedlens."""
    package = folder / "fedlens_fleet"
    files = {
        folder / "pyproject.toml": APP.format(sites=sites, out=out),
        package / "__init__.py": "",
        package / "experiment.toml": experiment,
        **{package / f"{half}.py": HALF.format(half=half) for half in ("client", "server")},
    }
    for path, text in files.items():
        write_atomically(path, text.encode())


@dataclass
class Tail:
    """Reads the complete lines that are added to a file after this object is made."""

    path: Path
    place: int = field(init=False)

    def __post_init__(self) -> None:
        self.place = self.path.stat().st_size if self.path.is_file() else 0

    def new(self) -> str:
        if not self.path.is_file():
            return ""
        with self.path.open("rb") as file:
            if file.seek(0, os.SEEK_END) < self.place:
                self.place = 0  # another file is at its place
            file.seek(self.place)
            whole = file.read().rpartition(b"\n")
        self.place += len(whole[0] + whole[1])
        return (whole[0] + whole[1]).decode(errors="replace")


class SuperLink:
    """A SuperLink that only this machine can reach. Its state is kept in `folder`."""

    def __init__(self, folder: Path, keys: Path) -> None:
        self.folder, self.keys, self.port = folder, keys, free_port()
        self.log = folder / "superlink.log"

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def __enter__(self) -> SuperLink:
        from flwr.supercore.control import ControlHttpClient
        from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor

        database = self.folder / "superlink.db"
        (self.folder / "flower").mkdir(parents=True, exist_ok=True)
        database.touch(mode=0o600)  # it holds what sites send
        self.process = start(
            self.folder,
            "superexec",
            (
                *(self.address, self.keys / CA),
                *("--host", "127.0.0.1", "--port", self.port),
                *("--ssl-ca-certfile", self.keys / CA, "--ssl-certfile", self.keys / SERVER),
                *("--ssl-keyfile", self.keys / SERVER_KEY, "--enable-supernode-auth"),
                *("--database", database, "--isolation", "process"),
                "--disable-runtime-dependency-installation",
            ),
            self.log,
        )
        try:
            self._wait()
            self.control: Any = ControlHttpClient.from_server_address(
                server_address=self.address,
                insecure=False,
                root_certificates=(self.keys / CA).read_bytes(),
                interceptors=[RuntimeVersionHttpInterceptor(component_name="flwr CLI")],
            )
        except BaseException:
            end(self.process)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.control.close()
        end(self.process)

    def _wait(self) -> None:
        trust = ssl.create_default_context(cafile=str(self.keys / CA))
        last = time.monotonic() + 120
        while time.monotonic() < last:
            if self.process.poll() is not None:
                break
            health = f"https://{self.address}/health"
            with suppress(OSError), urllib.request.urlopen(health, context=trust):
                return
            time.sleep(0.1)
        raise OSError(f"Flower's SuperLink does not start: see {self.log}")

    def register(self, public: Mapping[str, bytes]) -> dict[str, int]:
        """Register the sites with these keys, remove all others, and return node ids by name."""
        from flwr.proto.control_pb2 import (
            ListNodesRequest,
            RegisterNodeRequest,
            UnregisterNodeRequest,
        )

        known = {
            node.public_key: node.node_id
            for node in self.control.ListNodes(ListNodesRequest()).nodes_info
            if node.status != "unregistered"
        }
        for key, number in known.items():
            if key not in public.values():
                self.control.UnregisterNode(UnregisterNodeRequest(node_id=number))
        found = {}
        for name, key in public.items():
            if key in known:
                found[name] = known[key]
            else:
                request = RegisterNodeRequest(public_key=key, name=name)
                found[name] = self.control.RegisterNode(request).node_id
        return {name: int(number) for name, number in found.items()}

    def run(self, app: Path, config: Mapping[str, str]) -> int:
        """Start a run of an app, and return the run id."""
        from flwr.cli.build import build_fab_from_disk
        from flwr.common.serde import fab_to_proto, user_config_to_proto
        from flwr.proto.control_pb2 import StartRunRequest
        from flwr.supercore.constant import NOOP_FEDERATION_ID
        from flwr.supercore.fab import Fab

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Flower calls deprecated functions of other libraries
            content = build_fab_from_disk(app)
        fab = Fab(hashlib.sha256(content).hexdigest(), content, {})
        request = StartRunRequest(
            fab=fab_to_proto(fab),
            override_config=user_config_to_proto(dict(config)),
            federation=NOOP_FEDERATION_ID,
        )
        return int(self.control.StartRun(request).run_id)


def start_node(
    home: Path, data: Path, server: str, device: str, log: Path, cache: bool = True
) -> subprocess.Popen[bytes]:
    """Start the process of a site that speaks with the server (`node.py`).

    Only this user can read what it writes: its memory of experiments, images that were decoded.
    """
    (home / "flower").mkdir(mode=0o700, exist_ok=True)
    words = (server, home.resolve(), data.resolve(), device, str(cache).lower())
    return start(home, "node", words, log, umask=0o077)
