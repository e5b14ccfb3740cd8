"""Secure sums of real processes, over sockets: with sites that are killed or suspended."""

import os
import signal
from dataclasses import replace

import pytest

import fedlens as fl
from fedlens.fleet.terms import for_fleet
from fedlens.storage.run_files import read_records
from tests.fleet.real import Federation, orders, processes_of, soon, updates, wait_until
from tests.fleet.sites import model_bytes
from tests.fleet.test_long import described

pytest.importorskip("flwr", reason="a fleet needs flwr: pip install 'fedlens[fleet]'")
pytestmark = pytest.mark.fleet  # a round of real processes takes seconds

SUMS = "aggregation = { secure = true, bits = 40 }\n"


def simulated(path, out):
    experiment = for_fleet(fl.Experiment.read(path))
    assert experiment.aggregation is not None
    sums = replace(experiment.aggregation, secure="simulated")
    fl.run(replace(experiment, aggregation=sums), out)


def end_in(fleet, name, what, how):
    """A site is ended, or suspended, once it was asked for something again."""
    site = fleet.sites[name]
    count = (lambda: updates(site)) if what == "train" else (lambda: orders(site, what))
    before = count()
    wait_until(lambda: count() > before)
    if how == signal.SIGKILL:
        fleet.kill(name)
    else:
        os.killpg(fleet.processes[name].pid, how)


def test_sums_of_five_processes_have_the_bytes_of_the_simulation_whoever_is_lost(tmp_path):
    first = described(tmp_path, "scaffold", more=SUMS)
    fleet = Federation(tmp_path / "fleet", first)
    with fleet.opened():
        for name in fleet.sites:
            fleet.start(name)
        assert fleet.run(first, tmp_path / "run", wait=600.0) == "finished"
        simulated(first, tmp_path / "here")
        assert model_bytes(tmp_path / "run") == model_bytes(tmp_path / "here")
        # Killed after its numbers came: they are in the sum, and the bytes are the same.
        later = described(tmp_path, "fedavg", "later.toml", SUMS, rounds=1)
        fleet.approve(later)
        ended = soon(lambda: end_in(fleet, "site-0002", "train", signal.SIGSTOP))
        resumed = soon(lambda: _goes_on(fleet, "site-0002", ended))
        assert fleet.run(later, tmp_path / "later", wait=600.0) == "finished"
        resumed.join()
        simulated(later, tmp_path / "later-here")
        assert model_bytes(tmp_path / "later") == model_bytes(tmp_path / "later-here")
        # Killed while it trains: the sum is that of the other four.
        last = described(tmp_path, "fedavg", "last.toml", SUMS + "seed = 7\n", rounds=1)
        fleet.approve(last)
        ended = soon(lambda: end_in(fleet, "site-0001", "train", signal.SIGKILL))
        assert fleet.run(last, tmp_path / "last", wait=600.0) == "finished"
        ended.join()
        (record,) = read_records(tmp_path / "last")
        assert sorted(record["clients"]) == [0, 2, 3, 4]
        assert [1] in record["failed"].values()  # others may be late, and are asked again
    wait_until(lambda: not processes_of(tmp_path))


def _goes_on(fleet, name, stopped):
    """A suspended site goes on after some seconds."""
    stopped.join()
    wait_until(lambda: orders(fleet.sites["site-0000"], "train") >= 3)
    os.killpg(fleet.processes[name].pid, signal.SIGCONT)
