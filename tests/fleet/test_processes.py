"""Faults of sites that are real processes: clocks, keys, versions, disks, pauses, many, large."""

import os
import resource
import shutil
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest

import fedlens as fl
from fedlens.fleet.policy import FILE
from fedlens.fleet.site import Site
from fedlens.fleet.terms import for_fleet
from fedlens.fleet.trial import start_site
from fedlens.storage.run_files import read_records
from tests.fleet import wide
from tests.fleet.real import (
    Federation,
    processes_of,
    soon,
    updates,
    wait_until,
    with_code_of_tests,
)
from tests.fleet.sites import model_bytes, write_experiment
from tests.fleet.test_long import described

pytest.importorskip("flwr", reason="a fleet needs flwr: pip install 'fedlens[fleet]'")
pytestmark = pytest.mark.fleet

ALL = "reporting = { quorum = 1.0, deadline = 1200.0 }\n"
STRANGE = """
import datetime
import sys

if "fedlens.fleet.node" in sys.orig_argv:
    import flwr.supercore.date
    import flwr.supernode.node_auth_http_interceptor as signing

    behind = datetime.timedelta(days={days})
    signing.now = lambda: flwr.supercore.date.now() - behind

if "fedlens.fleet.worker" in sys.orig_argv:
    from fedlens.runs import manifest

    honest = manifest.versions
    manifest.versions = lambda: honest() | {{"torch": "2.0.1", "revision": "abcdef12"}}
"""


def strange(monkeypatch, folder: Path, days: int) -> None:
    """Processes that start now have a wrong clock and other versions."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(STRANGE.format(days=days))
    own = os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{own}")


def same_as_simulated(path, out, here):
    fl.run(for_fleet(fl.Experiment.read(path)), here)
    return model_bytes(out) == model_bytes(here)


def test_clocks_keys_and_versions_that_do_not_fit_are_said_in_a_line(tmp_path, monkeypatch):
    path = described(tmp_path, "fedavg", more=ALL, sites=3)
    fleet = Federation(tmp_path / "fleet", path)
    first, second, third = fleet.sites
    with fleet.opened():
        fleet.start(first)
        mark = fleet.sites[first].home / "flower" / "node"
        wait_until(mark.is_file)
        copied = fleet.sites[first].home.with_name("copied")  # somebody else has its key, too
        shutil.copytree(fleet.sites[first].home, copied, ignore=shutil.ignore_patterns("flower"))
        twin = start_site(Site(copied, copied / "data.npz"), fleet.server)
        assert twin.wait(300) != 0
        with monkeypatch.context() as changed:
            strange(changed, tmp_path / "day", days=1)
            late = start_site(fleet.sites[third], fleet.server)
            assert late.wait(300) != 0
        with monkeypatch.context() as changed:
            strange(changed, tmp_path / "skewed", days=0)
            fleet.start(second)
        fleet.start(third)
        assert fleet.run(path, tmp_path / "run", wait=600.0) == "finished"
    told = "\n".join(fleet.told)
    assert f"{first} counts as connected already" in told
    assert f"the clock of {third} is 86,4" in told and "s behind this server's" in told
    (line,) = (one for one in fleet.told if one.startswith(f"{second}: ") and "examples" in one)
    assert "torch 2.0.1, not" in line and "revision abcdef12, not" in line
    assert same_as_simulated(path, tmp_path / "run", tmp_path / "here")


def children_of(process: int) -> list[int]:
    found = Path(f"/proc/{process}/task/{process}/children").read_text()
    return [int(one) for one in found.split()]


def limit_files(site, size: int) -> None:
    """Let the processes of a site write no file beyond this size: as a disk that is full."""
    limit = size, resource.RLIM_INFINITY
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if str(site.home) in (place / "cmdline").read_bytes().decode(errors="replace"):
                resource.prlimit(int(place.name), resource.RLIMIT_FSIZE, limit)


def test_a_pause_of_a_minute_and_a_full_disk_in_a_round_leave_no_trace(tmp_path):
    """SCAFFOLD, whose sites write what they remember before an update leaves."""
    path = described(tmp_path, "scaffold", more=ALL, rounds=4, sites=3)
    fleet = Federation(tmp_path / "fleet", path)
    paused, full, _ = fleet.sites

    def act():
        site, node = fleet.sites[full], fleet.processes[full]
        wait_until(lambda: updates(site) >= 1)
        limit_files(site, 1)
        before = len(fleet.told)
        wait_until(lambda: any(full in line for line in fleet.told[before:]), 300)
        limit_files(site, resource.RLIM_INFINITY)
        assert node.poll() is None
        wait_until(lambda: updates(fleet.sites[paused]) >= 3)
        os.killpg(fleet.processes[paused].pid, signal.SIGSTOP)
        time.sleep(60)
        os.killpg(fleet.processes[paused].pid, signal.SIGCONT)

    with fleet.opened():
        for name in fleet.sites:
            fleet.start(name)
        acting = soon(act)
        assert fleet.run(path, tmp_path / "run", wait=600.0) == "finished"
        acting.join()
    print([record.get("failed_before") for record in read_records(tmp_path / "run")])
    assert same_as_simulated(path, tmp_path / "run", tmp_path / "here")
    wait_until(lambda: not processes_of(tmp_path))


def test_twenty_sites_at_once_end_with_the_bytes_of_the_simulation(tmp_path):
    path = described(tmp_path, "fedavg", more=ALL, sites=20)
    fleet = Federation(tmp_path / "fleet", path)
    with fleet.opened():
        for name in fleet.sites:
            fleet.start(name)
        assert fleet.run(path, tmp_path / "run", wait=1200.0) == "finished"
    records = read_records(tmp_path / "run")
    assert [len(record["clients"]) for record in records] == [20, 20]
    print("20 sites: rounds of", ", ".join(f"{record['seconds']:.1f}" for record in records), "s")
    assert same_as_simulated(path, tmp_path / "run", tmp_path / "here")


@pytest.mark.parametrize("megabytes", [45, 100])
def test_a_large_model_is_sent_and_comes_back_to_the_bit(megabytes, tmp_path, monkeypatch):
    with_code_of_tests(monkeypatch)
    hidden = megabytes * 10**6 // (4 * 197)
    model = f'{{ name = "{wide.NAME}", hidden = {hidden} }}'
    path = write_experiment(tmp_path, more=ALL, rounds=3, per_round=2, count=2)
    path.write_text(path.read_text().replace('"linear"', model))
    fleet = Federation(tmp_path / "fleet", path)
    for site in fleet.sites.values():
        (site.home / FILE).write_text(f'own_code = ["{wide.NAME}"]\n')
    with fleet.opened():
        for name in fleet.sites:
            fleet.start(name)
        assert fleet.run(path, tmp_path / "run", wait=600.0) == "finished"
    records = read_records(tmp_path / "run")
    assert records[0]["bytes_up"] > 2 * 0.99e6 * megabytes
    assert not any(record["failed"] for record in records)
    seconds = ", ".join(f"{record['seconds']:.1f}" for record in records)
    print(f"{megabytes} MB, two sites: rounds of {seconds} s")
    assert same_as_simulated(path, tmp_path / "run", tmp_path / "here")
