"""What a site needs of memory for an order, by what the system has given its process."""

import multiprocessing
import subprocess
import sys
from pathlib import Path

import pytest

from fedlens.fleet import payload
from fedlens.fleet.policy import FILE
from fedlens.fleet.site import ROOM
from tests.fleet import wide
from tests.fleet.real import with_code_of_tests
from tests.fleet.sites import Nearby, make_sites, run_nearby, write_experiment

HIDDEN = 50_000  # 39 MB, nearly all of it in one tensor
SIZE = 4 * HIDDEN * 197
MEASURED = """
import json
import sys
from pathlib import Path

from fedlens.fleet import worker

answer, place = worker.answer, Path(sys.argv[1])


def memory(kind):
    text = Path("/proc/self/status").read_text()
    return 1024 * int(text.partition(f"{kind}:")[2].split()[0])


def measured(link, site):
    Path("/proc/self/clear_refs").write_text("5")  # the most is counted from here on
    before = memory("VmRSS")
    answer(link, site)
    with place.open("a") as file:
        file.write(f"{memory('VmHWM') - before}\\n")


worker.answer = measured
worker.main(*sys.argv[2:])
"""


class Apart(Nearby):
    """A site whose orders are answered by a process of its own; `found` has what each needed."""

    def __init__(self, sites, found):
        super().__init__(sites)
        (site,), (self.link, theirs) = sites, multiprocessing.Pipe()
        with theirs:
            words = [found, theirs.fileno(), site.home, site.data, "cpu", "true"]
            self.process = subprocess.Popen(
                [sys.executable, "-c", MEASURED, *map(str, words)], pass_fds=[theirs.fileno()]
            )

    def send(self, what, orders, tensors, seconds):
        (order,) = orders.values()
        facts, content = payload.written(order, tensors)
        self.link.send((what, facts))
        self.link.send_bytes(content)
        said = self.link.recv()
        self.waiting.append((0, payload.read(said[0], self.link.recv_bytes())))


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="it is measured on Linux")
def test_a_site_trains_within_the_room_that_it_asked_for(tmp_path, monkeypatch):
    """The model as it came and as it is trained, and no other that lasts."""
    with_code_of_tests(monkeypatch)
    path = write_experiment(tmp_path, rounds=2, per_round=1, count=1)
    model = f'{{ name = "{wide.NAME}", hidden = {HIDDEN} }}'
    path.write_text(path.read_text().replace('"linear"', model))
    sites = make_sites(path, tmp_path / "sites")
    (sites[0].home / FILE).write_text(f'own_code = ["{wide.NAME}"]\n')
    links = []

    def connect(some, _):
        links.append(Apart(some, tmp_path / "found"))
        return links[-1]

    monkeypatch.setattr("tests.fleet.sites.Nearby", connect)
    run_nearby(path, tmp_path / "run", sites)
    for one in links:
        one.link.close()
        one.process.wait(60)
    needed = [int(line) / SIZE for line in (tmp_path / "found").read_text().split()]
    print([round(one, 2) for one in needed])
    _, *trained, kept = needed
    assert len(trained) == 2 and max(*trained, kept) < 4 < ROOM
