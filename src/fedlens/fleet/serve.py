"""`fedlens fleet serve`: a SuperLink behind its gate, and the ServerApp of a run on it."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedlens.config.experiment import Experiment
from fedlens.fleet import Notify
from fedlens.fleet.flower import SuperLink, Tail, write_app
from fedlens.fleet.gate import Gate
from fedlens.fleet.keys import check_server_keys, invited, public_keys, texts
from fedlens.fleet.members import Members, read_members
from fedlens.fleet.server import REPORTS, Job
from fedlens.fleet.status import FILE as STATUS
from fedlens.fleet.status import Page
from fedlens.report.live import serving
from fedlens.runs.progress import Watch
from fedlens.storage.files import write_atomically
from fedlens.storage.locks import one_writer
from fedlens.storage.process_state import is_alive
from fedlens.storage.run_files import can_go_on, identity

LOOK = 0.2  # seconds between two checks of a run's progress
LOOK_AT_KEYS = 1.0  # and of which sites have keys


@contextmanager
def open_fleet(
    keys: Path, home: Path, host: str, port: int, notify: Notify
) -> Iterator[tuple[SuperLink, Members]]:
    """Start a SuperLink that sites with known keys reach at host:port; with these sites."""
    check_server_keys(keys)
    public_keys(keys)  # or a ValueError
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    with one_writer(home), SuperLink(home, keys) as link:
        members = Members(keys, home, link, notify)
        members.refresh()
        with Gate(host, port, link.address, keys, notify, members.names):
            expected = [name for name, one in read_members(home).items() if one.expected]
            notify(f"listening on {host}:{port} for {', '.join(expected)}")
            yield link, members


def serve(
    experiment: Experiment,
    job: Job,
    keys: Path,
    home: Path,
    host: str,
    port: int,
    notify: Notify,
    watch: Watch | None = None,
    page: tuple[str, int] | None = None,
) -> str:
    """Run an experiment on the sites that connect, and return the status of the run.

    `page` is where the live page is served, if it is. The job's experiment file is written only
    when `home` is locked: no other server uses it then.
    """
    home = home.resolve()
    num_sites = len(public_keys(keys)) + len(invited(keys))
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
    with ExitStack() as stack:
        link, members = stack.enter_context(open_fleet(keys, home, host, port, notify))
        write_atomically(Path(job.experiment), experiment.toml().encode())
        if not job.resume:
            (home / STATUS).unlink(missing_ok=True)
        if page is not None:
            out = Path(job.out)
            address = stack.enter_context(serving([out], *page, beside=Page(home, out.name)))
            notify(f"page: {address}")
        job = replace(job, keys=texts(keys.glob("*.pub")))
        return run_on(link, job, home, notify, watch, members.refresh)


def run_on(
    link: SuperLink,
    job: Job,
    home: Path,
    notify: Notify,
    watch: Watch | None = None,
    look: Callable[[], None] = lambda: None,
) -> str:
    """Run a job on a SuperLink that is running, and return the status of the run.

    `look` is called every second, meanwhile.
    """
    out, experiment = Path(job.out).resolve(), Path(job.experiment).resolve()
    job = replace(
        job, out=str(out), experiment=str(experiment), home=str(home), served_by=os.getpid()
    )
    path = home / "job.json"
    job.write(path)
    reports = path.with_suffix(REPORTS)
    reports.unlink(missing_ok=True)
    write_app(home / "app", "")
    replaced = None if job.resume else identity(out)
    link.run(home / "app", {"job": str(path)})
    try:
        outcome = follow(link, Tail(reports), notify, watch, look)
    except OSError as error:
        remedy = "go on with --resume" if can_go_on(out, replaced) else "start it again"
        raise OSError(f"{error}; {remedy}") from error
    if "mistake" in outcome:
        raise ValueError(outcome["mistake"])
    if "error" in outcome:
        raise RuntimeError(f"{outcome['error']}\n{outcome['trace']}")
    return str(outcome["status"])


def follow(
    link: SuperLink,
    reports: Tail,
    notify: Notify,
    watch: Watch | None = None,
    look: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Pass on what the ServerApp's process reports, and return its outcome."""
    app: int | None = None  # the process id
    looked = time.monotonic()
    try:
        while True:
            link_ended = link.process.poll() is not None
            app_ended = app is not None and not is_alive(app)
            for line in reports.new().splitlines():
                kind, told = json.loads(line)
                if kind == "line":
                    notify(told)
                elif kind == "record" and watch is not None:
                    watch(told)
                elif kind == "process":
                    app = told
                elif kind == "outcome":
                    return dict(told)
            if link_ended or app_ended:
                who = "Flower's SuperLink" if link_ended else "the server's app"
                raise OSError(f"{who} has ended: see {link.log}")
            if time.monotonic() - looked > LOOK_AT_KEYS:
                look()
                looked = time.monotonic()
            time.sleep(LOOK)
    except BaseException:
        if app is not None and is_alive(app):
            with suppress(ProcessLookupError, PermissionError):  # it may be another user's now
                os.kill(app, signal.SIGTERM)
        raise
