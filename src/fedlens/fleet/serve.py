"""`fedlens fleet serve`: a SuperLink behind its gate, and the server's half of a run on it."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedlens.fleet.flower import SuperLink, write_app
from fedlens.fleet.gate import Gate
from fedlens.fleet.keys import CA, public_keys
from fedlens.fleet.server import Job
from fedlens.run_files import ROUNDS, read_records
from fedlens.runs.active import Watch

LOOK = 0.2  # seconds between two looks at how a run stands

Tell = Callable[[str], None]


@contextmanager
def open_fleet(
    keys: Path, home: Path, host: str, port: int, tell: Tell
) -> Iterator[tuple[SuperLink, dict[str, int]]]:
    """A SuperLink that sites with known keys can reach at host:port; and their numbers there."""
    if not (keys / CA).is_file():
        raise ValueError(f"{keys} has no {CA}: make keys with `fedlens fleet keys`")
    public = public_keys(keys)
    with SuperLink(home, keys) as link:
        numbers = link.register(public)
        with Gate(host, port, link.address, keys, tell):
            yield link, numbers


def serve(
    job: Job, keys: Path, home: Path, host: str, port: int, tell: Tell, watch: Watch | None = None
) -> str:
    """Do a job on the sites that come; how it ended, as the status of a run."""
    home = home.resolve()
    with open_fleet(keys, home, host, port, tell) as (link, numbers):
        return run_on(link, replace(job, sites=numbers), home, tell, watch)


def run_on(link: SuperLink, job: Job, home: Path, tell: Tell, watch: Watch | None = None) -> str:
    """Do a job on a SuperLink that is there."""
    path, app = home / "job.json", home / "app"
    for ending in (".events", ".result", ".pid"):
        path.with_suffix(ending).unlink(missing_ok=True)
    out = Path(job.out).resolve()
    job = replace(job, out=str(out), experiment=str(Path(job.experiment).resolve()))
    job.write(path)
    write_app(app, "")
    link.run(app, {"job": str(path)})
    follow = Follow(path, out, tell, watch)
    try:
        outcome = follow.until_done(link)
    except BaseException:
        _end_app(path)
        raise
    follow.look()
    if "mistake" in outcome:
        raise ValueError(outcome["mistake"])
    if "error" in outcome:
        raise RuntimeError(f"{outcome['error']}\n{outcome.get('trace', '')}")
    return str(outcome["status"])


class Follow:
    """What the ServerApp's process writes, told here as it comes."""

    def __init__(self, job: Path, out: Path, tell: Tell, watch: Watch | None) -> None:
        self.job, self.out, self.tell, self.watch = job, out, tell, watch
        self.num_events = 0
        self.last_round = self._newest()

    def _newest(self) -> int:
        records = read_records(self.out) if (self.out / ROUNDS).is_file() else []
        return max((record["round"] for record in records), default=0)

    def until_done(self, link: SuperLink) -> dict[str, Any]:
        result = self.job.with_suffix(".result")
        while True:
            self.look()
            if result.is_file():
                outcome: dict[str, Any] = json.loads(result.read_text())
                return outcome
            if link.process.poll() is not None:
                raise OSError(f"Flower's SuperLink has ended: see {link.log}; go on with --resume")
            pid = _pid(self.job)
            if pid is not None and not _is_alive(pid) and not result.is_file():
                raise OSError(f"the server's app has ended: see {link.log}; go on with --resume")
            time.sleep(LOOK)

    def look(self) -> None:
        events = self.job.with_suffix(".events")
        if events.is_file():
            lines = events.read_text().splitlines()
            for line in lines[self.num_events :]:
                self.tell(line)
            self.num_events = len(lines)
        if self.watch is not None and (self.out / ROUNDS).is_file():
            for record in read_records(self.out):
                if record["round"] > self.last_round:
                    self.last_round = record["round"]
                    self.watch(record)


def _pid(job: Path) -> int | None:
    path = job.with_suffix(".pid")
    return int(path.read_text()) if path.is_file() else None


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with suppress(OSError):
        # One that has ended and is not waited for yet is as good as gone.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return True


def _end_app(job: Path) -> None:
    """End the ServerApp's process, which Flower started."""
    pid = _pid(job)
    if pid is not None and _is_alive(pid):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
