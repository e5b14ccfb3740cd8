"""A federation of real processes on this machine: a SuperLink behind its gate, and SuperNodes."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import fedlens
from fedlens.config.experiment import Experiment
from fedlens.fleet.flower import end, free_port
from fedlens.fleet.keys import texts
from fedlens.fleet.serve import open_fleet, run_on
from fedlens.fleet.server import Job
from fedlens.fleet.site import Site
from fedlens.fleet.terms import Terms, for_fleet, peers
from fedlens.fleet.trial import make_homes, make_keys, start_site
from fedlens.setup.data import load_dataset


def with_code_of_tests(monkeypatch: Any) -> None:
    """Processes that start now find the code of these tests, and the Fedlens that is tested."""
    places = [Path(__file__).parents[2], Path(fedlens.__file__).parents[1]]
    before = os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([*map(str, places), *[before] * bool(before)]))


class Federation:
    """Sites of one experiment; others may be approved later."""

    def __init__(self, folder: Path, path: Path) -> None:
        self.folder, self.told = folder, list[str]()
        self.keys, self.home, self.port = folder / "keys", folder / "server", free_port()
        self.sites = {
            site.home.name: site
            for site in make_homes(for_fleet(Experiment.read(path)), folder / "sites")
        }
        make_keys([*self.sites.values()], self.keys)
        self.processes: dict[str, Any] = {}

    @property
    def public(self) -> dict[str, str]:
        return texts(self.keys.glob("*.pub"))

    @property
    def server(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self, name: str) -> None:
        self.processes[name] = start_site(self.sites[name], self.server)

    def kill(self, name: str, how: int = signal.SIGKILL) -> None:
        """End a site's SuperNode; what it had started ends by itself."""
        process = self.processes[name]
        with suppress(ProcessLookupError):
            os.killpg(process.pid, how)
        process.wait(300)

    def look_after(self) -> None:
        """Start sites that have ended again: one that was killed is refused for a minute.

        By a thread that lives on: a process is ended with the thread that started it.
        """
        for name, process in self.processes.items():
            if process.poll() is not None:
                self.start(name)

    @contextmanager
    def opened(self) -> Iterator[Federation]:
        with ExitStack() as stack:
            stack.callback(self.close)
            where = self.keys, self.home, "127.0.0.1", self.port
            self.link, self.members = stack.enter_context(open_fleet(*where, self.told.append))
            yield self

    def close(self) -> None:
        for process in self.processes.values():
            process.terminate()
        for process in self.processes.values():
            end(process)
        self.processes = {}

    def approve(self, path: Path) -> None:
        """Let all sites take part in another experiment."""
        experiment = for_fleet(Experiment.read(path))
        data = load_dataset(experiment.dataset, None)
        terms = Terms.of(experiment, data, peers(self.public))
        for client, site in enumerate(self.sites.values()):
            site.approvals.approve(site.offer(terms, client))

    def run(
        self, path: Path, out: Path, watch: Callable[[Any], None] | None = None, **job: Any
    ) -> str:
        told = self.told.append
        return run_on(
            self.link,
            Job(str(path), str(out), {}, keys=self.public, **job),
            self.home,
            told,
            watch,
            self.members.refresh,
        )


def orders(site: Site, what: str = "train") -> int:
    """How often a site was asked."""
    log = site.home / "log.jsonl"
    return log.read_text().count(f'"asked": "{what}"') if log.is_file() else 0


def updates(site: Site) -> int:
    """How many updates a site has begun, of all experiments."""
    approvals = map(site.approvals.of, site.approvals.approved())
    return sum(len(one.updates) for one in approvals)


def soon(act: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=act)
    thread.start()
    return thread


def wait_until(true: Callable[[], bool], seconds: float = 600.0) -> None:
    last = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < last
        time.sleep(0.2)


def processes_of(folder: Path) -> list[str]:
    """The command lines of processes that have to do with a folder."""
    found = []
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            line = place.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if str(folder) in line:
                found.append(line)
    return found
