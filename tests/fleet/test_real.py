"""A federation of real processes, over TLS, with keys: the short form."""

import http.client
import signal
import ssl

import numpy as np
import pytest

import fedlens as fl
from fedlens.fleet import CA, flower, gate
from fedlens.fleet.terms import for_fleet
from fedlens.storage.run_files import read_records
from tests.fleet.real import Federation, orders, processes_of, soon, updates, wait_until
from tests.fleet.sites import model_bytes, write_experiment

pytest.importorskip("flwr", reason="a fleet needs flwr: pip install 'fedlens[fleet]'")
pytestmark = pytest.mark.fleet  # a round of real processes takes seconds


def post(port, path, ca):
    trust = ssl.create_default_context(cafile=ca)
    connection = http.client.HTTPSConnection("127.0.0.1", port, context=trust, timeout=300)
    try:
        connection.request("POST", path, body=b"")
        return connection.getresponse().status
    finally:
        connection.close()


LOGS = ("log.jsonl", "node.log")
POISON = """
from pathlib import Path

if "{half}" == "client":
    Path({marker!r}).touch()
"""


@pytest.fixture
def captured(monkeypatch):
    """All that sites send, as it comes through the gate: paths with what is sent to them."""
    found: list[tuple[str, bytes]] = []
    pass_on = gate.Gate._pass_on

    async def seen(self, visit, client, request, peer):
        read = visit.body

        async def body():
            pieces = [piece async for piece in read()]
            found.append((request.target.decode(), b"".join(pieces)))
            for piece in pieces:
                yield piece

        visit.body = body
        try:
            await pass_on(self, visit, client, request, peer)
        finally:
            visit.body = read

    monkeypatch.setattr(gate.Gate, "_pass_on", seen)
    return found


def check_captured(fleet, captured):
    """Of images there is nothing; of numbers as many as are declared: an update and a control
    variate of 4 × 192 weights and 4 biases, each of 4 bytes or of 8, and a loss."""
    sites = fleet.sites.values()
    everything = b"|".join(body for _, body in captured)
    for site in sites:
        with np.load(site.data) as held:
            images = [image.tobytes() for image in held["x_train"]]
        assert images
        assert not any(image[:24] in everything for image in images)
    sent = [body for path, body in captured if path.endswith("push-object")]
    trained, asked = (
        sum(orders(site, what) for site in sites for what in kinds)
        for kinds in (["train"], ["train", "sizes"])
    )
    numbers = trained * (2 * (4 * 192 + 4) + 1)
    assert 4 * numbers < sum(map(len, sent)) < 8 * numbers + 3000 * asked


def test_a_federation_of_processes(tmp_path, monkeypatch, captured):
    """SCAFFOLD ends with the simulation's bytes, though the app that the server sends would do
    something else; sites reach the Fleet API alone; and then one of them ends."""
    marker = tmp_path / "ran"
    text = POISON.replace("{marker!r}", repr(str(marker))) + flower.HALF
    monkeypatch.setattr(flower, "HALF", text)
    path = write_experiment(tmp_path, '{ name = "scaffold" }', per_round=2)
    path.write_text(path.read_text().replace("count = 4", "count = 2"))
    fleet = Federation(tmp_path / "fleet", path)
    with fleet.opened():
        ca, port = fleet.keys / CA, fleet.port
        for name in fleet.sites:
            fleet.start(name)
        for place in ("/v1/control/start-run", "/v1/runtime/pull-messages", "/health"):
            assert post(port, place, ca) == 404
        assert post(port, "/v1/fleet/../control/start-run", ca) == 404
        assert post(port, "/v1/fleet/pull-messages", ca) >= 400  # without a key
        assert post(fleet.link.port, "/v1/control/list-runs", ca) != 404  # from here it is there
        with pytest.raises(ssl.SSLError):
            post(port, "/v1/fleet/pull-messages", None)  # a site that trusts another CA
        lines = list[str]()  # of the processes that run in a round
        watch = lambda _: lines.extend(processes_of(tmp_path))  # noqa: E731
        assert fleet.run(path, tmp_path / "run", watch, wait=600.0) == "finished"
        assert lines and not any("token" in line for line in lines)
        fl.run(for_fleet(fl.Experiment.read(path)), tmp_path / "here")
        assert model_bytes(tmp_path / "run") == model_bytes(tmp_path / "here")
        check_captured(fleet, captured)
        check_private(fleet)

        assert not marker.exists()
        assert not any((site.home / "flower" / "apps").exists() for site in fleet.sites.values())

        last = tmp_path / "last.toml"
        text = path.read_text().replace("scaffold", "fedavg").replace("rounds = 2", "rounds = 1")
        last.write_text(text + "reporting = { deadline = 60.0 }\nseed = 7\n")
        fleet.approve(last)
        ended = soon(lambda: _end_when_asked(fleet, "site-0001"))
        assert fleet.run(last, tmp_path / "one", wait=600.0) == "finished"
        ended.join()
        (record,) = read_records(tmp_path / "one")
        assert record["clients"] == [0]
        (outcome,) = record["failed"]
        assert outcome in ("dropped", "unavailable", "late")
    assert any("refused '/v1/control/start-run'" in line for line in fleet.told)
    assert any("unknown ca" in line for line in fleet.told)
    wait_until(lambda: not processes_of(tmp_path))


def check_private(fleet):
    """Others can read neither what a site writes nor what the server keeps of sites."""
    others = 0o077
    kept = [
        path
        for site in fleet.sites.values()
        for name in ("memory", "cache", "flower")
        for path in (site.home / name, *(site.home / name).rglob("*"))
    ]
    kept += [site.home / name for site in fleet.sites.values() for name in LOGS]
    kept += [fleet.home, fleet.home / "superlink.db", fleet.home / "superlink.log"]
    assert any(path.suffix == ".safetensors" for path in kept)
    assert [str(path) for path in kept if path.stat().st_mode & others] == []


def _end_when_asked(fleet, name):
    """A site ends in the midst of training."""
    site = fleet.sites[name]
    before = updates(site)  # counted before they are computed
    wait_until(lambda: updates(site) > before)
    fleet.kill(name, how=signal.SIGTERM)
