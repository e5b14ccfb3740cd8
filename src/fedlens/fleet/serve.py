"""`fedlens fleet serve`: a SuperLink behind its gate, and the ServerApp of a run on it."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedlens.config.experiment import Experiment
from fedlens.fleet import Notify
from fedlens.fleet.flower import SuperLink, write_app
from fedlens.fleet.gate import Gate
from fedlens.fleet.keys import check_server_keys, public_keys
from fedlens.fleet.server import Job
from fedlens.runs.watching import Watch
from fedlens.storage.files import write_atomically
from fedlens.storage.locks import one_writer
from fedlens.storage.process_state import is_alive
from fedlens.storage.run_files import ROUNDS, can_go_on, identity, read_records

LOOK = 0.2  # seconds between two checks of a run's progress


@contextmanager
def open_fleet(
    keys: Path, home: Path, host: str, port: int, notify: Notify
) -> Iterator[tuple[SuperLink, dict[str, int]]]:
    """Start a SuperLink that sites with known keys reach at host:port; with their node ids."""
    check_server_keys(keys)
    public = public_keys(keys)
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    with one_writer(home), SuperLink(home, keys) as link:
        numbers = link.register(public)
        names = {key: name for name, key in public.items()}
        with Gate(host, port, link.address, keys, notify, names):
            notify(f"listening on {host}:{port} for {', '.join(public)}")
            yield link, numbers


def serve(
    experiment: Experiment,
    job: Job,
    keys: Path,
    home: Path,
    host: str,
    port: int,
    notify: Notify,
    watch: Watch | None = None,
) -> str:
    """Run an experiment on the sites that connect, and return the status of the run.

    The job's experiment file is written only when `home` is locked: no other server uses it then.
    """
    home = home.resolve()
    check_server_keys(keys)
    num_sites = len(public_keys(keys))
    asked = experiment.clients.per_round
    needed = {
        "--at-least": job.at_least,
        "clients.per_round": asked if isinstance(asked, int) else 0,
    }
    for name, number in needed.items():  # checked first, before waiting hours for sites
        if (number or 0) > num_sites:
            raise ValueError(
                f"{name} is {number}, but {keys} has the keys of {num_sites}: choose fewer, or add "
                "those of others"
            )
    with open_fleet(keys, home, host, port, notify) as (link, numbers):
        write_atomically(Path(job.experiment), experiment.toml().encode())
        return run_on(link, replace(job, sites=numbers), home, notify, watch)


def run_on(
    link: SuperLink, job: Job, home: Path, notify: Notify, watch: Watch | None = None
) -> str:
    """Run a job on a SuperLink that is running, and return the status of the run."""
    path, app = home / "job.json", home / "app"
    for ending in (".events", ".result", ".pid"):
        path.with_suffix(ending).unlink(missing_ok=True)
    out = Path(job.out).resolve()
    experiment = str(Path(job.experiment).resolve())
    job = replace(job, out=str(out), experiment=experiment, served_by=os.getpid())
    job.write(path)
    write_app(app, "")
    follow = Follow(path, out, notify, watch, job.resume)
    link.run(app, {"job": str(path)})
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
    """Reads what the ServerApp's process writes, and reports it as it arrives."""

    def __init__(
        self, job: Path, out: Path, notify: Notify, watch: Watch | None, resumes: bool
    ) -> None:
        self.job, self.out, self.notify, self.watch = job, out, notify, watch
        self.replaced = None if resumes else identity(out)
        self.num_events = 0
        self.seen: tuple[int, int] | None = None  # modification time and size of the records' file
        before = [record["round"] for record in self._new_records()]
        self.last_round = max(before, default=0) if resumes else 0

    def _new_records(self) -> list[dict[str, Any]]:
        """All records if their file has changed since the last call, else none."""
        path = self.out / ROUNDS
        if not path.is_file():
            return []
        stat = path.stat()
        if (stat.st_mtime_ns, stat.st_size) == self.seen:
            return []
        self.seen = (stat.st_mtime_ns, stat.st_size)
        return read_records(self.out)

    def until_done(self, link: SuperLink) -> dict[str, Any]:
        result = self.job.with_suffix(".result")
        while True:
            self.look()
            if result.is_file():
                outcome: dict[str, Any] = json.loads(result.read_text())
                return outcome
            if link.process.poll() is not None:
                raise OSError(f"Flower's SuperLink has ended: see {link.log}; {self._remedy}")
            pid = _pid(self.job)
            if pid is not None and not is_alive(pid) and not result.is_file():
                raise OSError(f"the server's app has ended: see {link.log}; {self._remedy}")
            time.sleep(LOOK)

    @property
    def _remedy(self) -> str:
        return "go on with --resume" if can_go_on(self.out, self.replaced) else "start it again"

    def look(self) -> None:
        events = self.job.with_suffix(".events")
        if events.is_file():
            lines = events.read_text().splitlines()
            for line in lines[self.num_events :]:
                self.notify(line)
            self.num_events = len(lines)
        for record in self._new_records():
            if record["round"] > self.last_round:
                self.last_round = record["round"]
                if self.watch is not None:
                    self.watch(record)


def _pid(job: Path) -> int | None:
    path = job.with_suffix(".pid")
    return int(path.read_text()) if path.is_file() else None


def _end_app(job: Path) -> None:
    """End the ServerApp's process, which Flower started."""
    pid = _pid(job)
    if pid is not None and is_alive(pid):
        with suppress(ProcessLookupError, PermissionError):  # the pid may be another user's now
            os.kill(pid, signal.SIGTERM)
