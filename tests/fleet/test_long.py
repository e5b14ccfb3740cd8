"""Federations of real processes and their faults: the long form, `make test-fleet`."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from functools import partial

import pytest

import fedlens as fl
from fedlens.fleet import CA, NODE_KEY
from fedlens.fleet.flower import end
from fedlens.fleet.keys import make_server_keys, make_site_key
from fedlens.fleet.policy import FILE
from fedlens.fleet.terms import for_fleet
from fedlens.fleet.trial import start_site
from fedlens.storage.run_files import read_records
from tests.fleet import failing
from tests.fleet.real import (
    Federation,
    processes_of,
    soon,
    updates,
    wait_until,
    with_code_of_tests,
)
from tests.fleet.sites import model_bytes, write_experiment
from tests.fleet.test_same_bytes import PAPERS

pytest.importorskip("flwr", reason="a fleet needs flwr: pip install 'fedlens[fleet]'")
pytestmark = pytest.mark.fleet

SITES = 5
KILLS = int(os.environ.get("FEDLENS_KILLS", "20"))


def described(
    folder, paper, name="experiment.toml", more="", rounds=2, sites=SITES, per_round=None
):
    algorithm, per_round = PAPERS[paper], per_round or sites
    path = write_experiment(folder, algorithm, more, rounds=rounds, per_round=per_round)
    text = path.read_text().replace("count = 4", f"count = {sites}")
    path = folder / name
    path.write_text(text)
    return path


def test_five_sites_end_with_the_bytes_of_the_simulation(tmp_path):
    papers = ("fedavg", "scaffold", "fedadmm", "fedns", "fedvc", "median")
    first = described(tmp_path, papers[0], per_round=4)
    fleet = Federation(tmp_path / "fleet", first)
    with fleet.opened():
        for name in fleet.sites:
            fleet.start(name)
        for paper in papers:
            path = described(tmp_path, paper, f"{paper}.toml", per_round=4)
            fleet.approve(path)
            begun = time.monotonic()
            assert fleet.run(path, tmp_path / paper) == "finished"
            seconds = [record["seconds"] for record in read_records(tmp_path / paper)]
            fl.run(for_fleet(fl.Experiment.read(path)), tmp_path / f"{paper}-here")
            assert model_bytes(tmp_path / paper) == model_bytes(tmp_path / f"{paper}-here"), paper
            rounds = ", ".join(f"{s:.1f}" for s in seconds)
            print(f"{paper}: same bytes; {time.monotonic() - begun:.0f} s, rounds of {rounds} s")
    wait_until(lambda: not processes_of(tmp_path))


def test_strangers_are_refused_and_named(tmp_path):
    path = described(tmp_path, "fedavg", rounds=1, sites=3)
    fleet = Federation(tmp_path / "fleet", path)
    eve, mallory, dan = (fleet.sites[name] for name in sorted(fleet.sites))
    with fleet.opened():
        (eve.home / NODE_KEY).unlink()
        make_site_key(eve.home, "eve")  # a key that the server does not know
        make_server_keys(tmp_path / "other", ["127.0.0.1"])
        (mallory.home / CA).write_bytes((tmp_path / "other" / CA).read_bytes())
        for site in (eve, mallory):
            process = start_site(site, fleet.server)
            assert process.wait(300) != 0
        for kept in (dan.home / "approved").iterdir():
            kept.unlink()  # an experiment that was never approved here
        fleet.start(dan.home.name)
        with pytest.raises(ValueError, match="missing"):
            fleet.run(path, tmp_path / "run", wait=120.0)
    told = "\n".join(fleet.told)
    assert "is not registered" in told
    assert "unknown ca" in told
    assert f"{dan.home.name}: refused: experiment" in told


def test_servers_and_sites_that_are_killed_end_with_the_same_bytes(tmp_path):
    """Random kills of the server with all that belongs to it, and of sites, in mid-round.

    A site is back within the minute in which it is refused; meanwhile others may be killed.
    """
    rng = random.Random(0)
    path = described(
        tmp_path, "scaffold", more="reporting = { quorum = 1.0 }\n", rounds=2 * KILLS, sites=3
    )
    fleet = Federation(tmp_path / "fleet", path)
    out = tmp_path / "run"
    server = _serve(fleet, path, out)
    kills = {"server": 0, "site": 0}
    try:
        for name in fleet.sites:
            fleet.start(name)
        _wait_for_a_round(fleet, server, out)
        for number in range(KILLS):
            time.sleep(rng.uniform(0, 10))
            assert server.poll() is None, (fleet.folder / "serve.log").read_text()[-2000:]
            if number % 2:
                os.kill(server.pid, signal.SIGKILL)
                server.wait()
                server = _serve(fleet, path, out)
                kills["server"] += 1
                _wait_for_a_round(fleet, server, out)
            else:
                fleet.kill(rng.choice(sorted(fleet.sites)))
                kills["site"] += 1
        wait_until(partial(_has_ended, fleet, server), 1800)
        assert server.poll() == 0
    finally:
        fleet.close()
        end(server)
    fl.run(for_fleet(fl.Experiment.read(path)), tmp_path / "here")
    assert model_bytes(out) == model_bytes(tmp_path / "here")
    records = read_records(out)
    failed = Counter(
        why
        for record in records
        for failed in (record["failed"], record.get("failed_before", {}))
        for why, who in failed.items()
        for _ in who
    )
    print(f"same bytes after {kills}; sites were {dict(failed)}; {len(records)} rounds")


def _wait_for_a_round(fleet, server, out):
    """Until another round is over, or the server."""

    def done():
        return len(read_records(out)) if out.is_dir() else 0

    before = done()
    wait_until(lambda: _has_ended(fleet, server) or done() > before, 600)


def _has_ended(fleet, server):
    fleet.look_after()
    return server.poll() is not None


def _serve(fleet, path, out):
    words = ["fleet", "serve", path, "--keys", fleet.keys, "--home", fleet.home, "--quiet"]
    words += ["--address", fleet.server, "--out", out, "--resume"]
    with (fleet.folder / "serve.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "fedlens", *map(str, words)],
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def test_a_site_that_died_is_waited_for(tmp_path):
    """SIGKILL in mid-round: named as dropped, and asked again once it is back."""
    path = described(tmp_path, "scaffold", more="reporting = { quorum = 1.0 }\n", sites=3)
    fleet = Federation(tmp_path / "fleet", path)
    with fleet.opened():
        for name in fleet.sites:
            fleet.start(name)
        victim, over = sorted(fleet.sites)[1], threading.Event()

        def act():
            wait_until(lambda: updates(fleet.sites[victim]) > 0, 300)
            fleet.kill(victim)
            while not over.wait(1):
                fleet.look_after()

        acting = soon(act)
        try:
            assert fleet.run(path, tmp_path / "run") == "finished"
        finally:
            over.set()
            acting.join()
    fl.run(for_fleet(fl.Experiment.read(path)), tmp_path / "here")
    assert model_bytes(tmp_path / "run") == model_bytes(tmp_path / "here")
    records = read_records(tmp_path / "run")
    assert [record["failed"] for record in records] == [{}, {}]
    print([record.get("failed_before") for record in records])


def test_processes_of_sites_that_fail_are_named(tmp_path, monkeypatch):
    """What Flower makes of a process that raises, dies or does not end; and bad numbers."""
    with_code_of_tests(monkeypatch)  # its processes load the loss
    faults = ("raised", "dropped", "late", "nan", "huge")
    more = f'loss = "{failing.NAME}"\nreporting = {{ deadline = 120.0, largest = 1e6 }}\n'
    path = described(tmp_path, "fedavg", rounds=1, sites=len(faults) + 1, more="")
    path.write_text(more + path.read_text())
    fleet = Federation(tmp_path / "fleet", path)
    for site in fleet.sites.values():
        (site.home / FILE).write_text(f'own_code = ["{failing.NAME}"]\n')
    with fleet.opened():
        for name, fault in zip(fleet.sites, ("", *faults), strict=True):
            (fleet.sites[name].home / "fault").write_text(fault)
            fleet.start(name)
        assert fleet.run(path, tmp_path / "run") == "finished"
    (record,) = read_records(tmp_path / "run")
    print(json.dumps(record["failed"]), f"{record['seconds']:.0f} s")
    assert record["clients"] == [0]
    assert record["failed"] == {fault: [client] for client, fault in enumerate(faults, 1)}
    wait_until(lambda: not processes_of(tmp_path))


def test_the_command_tries_a_fleet(tmp_path):
    path = described(tmp_path, "clip, quantize x scaffold", sites=3)
    words = [sys.executable, "-m", "fedlens", "fleet", "try", str(path), "--json", "--sites", "2"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["identical"], found["largest_difference"], found["sites"]) == (True, 0.0, 2)
    assert "2 sites in the place of the experiment's 3 clients\n" in done.stderr
    assert "\nfleet: round 1/" in done.stderr and "\nsimulated: round 1/" in done.stderr
