"""`fedlens fleet join`: the SuperNode of a site, started again when it must be."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from fedlens.files import write_atomically
from fedlens.fleet.flower import end, start_supernode
from fedlens.fleet.keys import CA, NODE_KEY, check_name
from fedlens.fleet.policy import DEFAULT, FILE, Policy

PATIENCE = 100.0  # seconds: a node that died is refused for 60, as if another had its key
PAUSE = 5.0

Tell = Callable[[str], None]


def join(home: Path, name: str, data: Path, server: str, device: str, tell: Tell) -> None:
    """Take part until interrupted; a ValueError if the server does not let it in."""
    check_name(name)
    for needed, remedy in (
        (NODE_KEY, f"make it with `fedlens fleet keys {home} --site {name}`"),
        (CA, "get it from the server"),
    ):
        if not (home / needed).is_file():
            raise ValueError(f"{home / needed} is missing: {remedy}")
    if not data.exists():
        raise ValueError(f"{data} does not exist: set --data to the site's examples")
    if not (home / FILE).is_file():
        write_atomically(home / FILE, DEFAULT.encode())
    Policy.read(home)
    log = home / "supernode.log"
    refused_since: float | None = None
    while True:
        start_of_log = log.stat().st_size if log.is_file() else 0
        process = start_supernode(home, name, data, server, device, log)
        begun = time.monotonic()
        try:
            _watch(process, log, start_of_log, tell)
        finally:
            end(process)
        said = _new(log, start_of_log)
        if "CERTIFICATE_VERIFY_FAILED" in said:
            raise ValueError(f"{server} has no certificate by {home / CA}: get the server's ca.pem")
        now = time.monotonic()
        if now - begun > PATIENCE:
            refused_since = None
        refused_since = refused_since or begun
        if "2004" in said and now - refused_since > PATIENCE:
            raise ValueError(
                f"{server} does not let {name} in: give {name}.pub to who runs it, and see that "
                "no other process uses the key"
            )
        tell(f"not connected ({_reason(said)}); trying again")
        time.sleep(PAUSE)


def _watch(process: subprocess.Popen[bytes], log: Path, begin: int, tell: Tell) -> None:
    told = False
    while process.poll() is None:
        if not told and "SuperNode ID" in _new(log, begin):
            tell("connected")
            told = True
        time.sleep(0.5)


def _new(log: Path, begin: int) -> str:
    with log.open("rb") as file:
        file.seek(begin)
        return file.read().decode(errors="replace")


def _reason(said: str) -> str:
    return "its key is refused" if "2004" in said else "the connection was lost"
