"""Sites of real processes that come, go and come back while a server runs."""

import json
import shutil
import threading
import time

import pytest

from fedlens.fleet import CA
from fedlens.fleet.keys import withdraw
from fedlens.fleet.log import Log
from fedlens.fleet.members import read_members
from fedlens.storage.run_files import read_records
from tests.fleet.real import Federation, soon, updates, wait_until
from tests.fleet.sites import write_experiment

pytest.importorskip("flwr", reason="a fleet needs flwr: pip install 'fedlens[fleet]'")
pytestmark = pytest.mark.fleet


def test_a_site_that_was_killed_comes_back_at_once_and_one_is_withdrawn(tmp_path):
    """The key of a third one is put down in the middle of a run, in which it then takes part."""
    more = "reporting = { deadline = 300.0, quorum = 0.5 }\n"
    path = write_experiment(tmp_path, more=more, per_round=1.0, rounds=25)
    path.write_text(path.read_text().replace("count = 4", "count = 3"))
    fleet = Federation(tmp_path / "fleet", path)
    late = fleet.keys / "site-0002.pub"
    late.rename(tmp_path / "late.pub")
    with fleet.opened():
        for name in ("site-0000", "site-0001"):
            fleet.start(name)
        site = fleet.sites["site-0000"]
        node = site.home / "flower" / "node"
        wait_until(node.is_file)
        time.sleep(2)
        fleet.kill("site-0000")
        begun = time.monotonic()
        fleet.start("site-0000")
        log = site.home / "node.log"
        wait_until(lambda: log.read_text().count("connected to the server") == 2)
        print(f"a site that was killed was back after {time.monotonic() - begun:.1f} s")
        assert "2004" not in log.read_text(), "it was refused"

        two, three = fleet.sites["site-0001"], fleet.sites["site-0002"]

        def come_and_leave():
            wait_until(lambda: updates(two) >= 1)
            shutil.copy(tmp_path / "late.pub", late)
            wait_until(lambda: '"added"' in (fleet.home / "log.jsonl").read_text())
            fleet.start("site-0002")
            wait_until(lambda: updates(three) >= 1)
            withdraw(fleet.keys, "site-0001")
            over.wait()  # a process ends with the thread that started it

        over = threading.Event()
        going = soon(come_and_leave)
        try:
            assert fleet.run(path, tmp_path / "run", wait=600.0) == "finished"
        finally:
            over.set()
            going.join()
    records = read_records(tmp_path / "run")
    cohorts = [sorted(record["clients"]) for record in records]
    assert (cohorts[0], cohorts[-1]) == ([0, 1], [0, 2])
    assert [0, 1, 2] in cohorts
    assert records[-1]["failed"] == {"unavailable": [1]}
    events = [(one["event"], one.get("site")) for one in Log(fleet.home).events()]
    assert ("withdrawn", "site-0001") in events
    assert ("added", "site-0002") in events
    assert ("joined", "site-0002") in events
    assert read_members(fleet.home)["site-0001"].number == 1
    seconds = [record["seconds"] for record in records]
    print("rounds took", ", ".join(f"{s:.1f}" for s in seconds), "s")
    assert json.loads((fleet.home / "status.json").read_text())["sites"]["site-0001"]["used"] >= 1
    assert (site.home / CA).is_file()
