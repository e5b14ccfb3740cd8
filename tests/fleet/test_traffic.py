"""What goes over the sockets of sites, beside what the record of a run counts."""

import socket
import threading
from collections import Counter
from contextlib import suppress

import pytest

from fedlens.fleet.flower import free_port
from fedlens.fleet.trial import start_site
from fedlens.storage.run_files import read_records
from tests.fleet.real import Federation

pytest.importorskip("flwr", reason="a fleet needs flwr: pip install 'fedlens[fleet]'")
pytestmark = pytest.mark.fleet

EXPERIMENT = """\
dataset = "fashion-mnist-mini"
model = "mcmahan-cnn"
rounds = 2
algorithm = [{algorithm}]
local = {{ max_steps = 1, batch_size = 8 }}
clients = {{ count = 2 }}
evaluate = {{ on = [] }}
"""


ASKED = 400_000  # bytes, of both sites: requests of 2 kB until the first order, and between orders


class Relay:
    """Passes on what connections to its port send, and counts it."""

    def __init__(self, to: int) -> None:
        self.to, self.port, self.bytes = to, free_port(), Counter[str]()
        self.listener = socket.create_server(("127.0.0.1", self.port))
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):  # until it is closed
            while True:
                there, _ = self.listener.accept()
                try:
                    here = socket.create_connection(("127.0.0.1", self.to))
                except OSError:  # the server has ended
                    there.close()
                    continue
                for one, other, way in ((there, here, "up"), (here, there, "down")):
                    threading.Thread(target=self._pass, args=(one, other, way), daemon=True).start()

    def _pass(self, one: socket.socket, other: socket.socket, way: str) -> None:
        with suppress(OSError), one, other:
            while piece := one.recv(2**16):
                self.bytes[way] += len(piece)
                other.sendall(piece)


@pytest.mark.parametrize(
    "algorithm",
    [
        '{ name = "fedavg" }',
        '{ name = "scaffold" }',
        '{ name = "quantize", bits = 8 }',
        '{ name = "download", bits = 8 }',
    ],
)
def test_what_is_counted_is_what_goes_over_the_sockets(algorithm, tmp_path):
    """To 1%, beside what a site asks in vain while it waits. The model has 6.7 MB."""
    path = tmp_path / "experiment.toml"
    path.write_text(EXPERIMENT.format(algorithm=algorithm))
    fleet = Federation(tmp_path / "fleet", path)
    relay = Relay(fleet.port)
    with fleet.opened():
        for name, site in fleet.sites.items():
            fleet.processes[name] = start_site(site, f"127.0.0.1:{relay.port}")
        assert fleet.run(path, tmp_path / "run", wait=600.0) == "finished"
        found = dict(relay.bytes)
    relay.listener.close()
    for way in ("up", "down"):
        counted = sum(record[f"bytes_{way}"] for record in read_records(tmp_path / "run"))
        print(f"{algorithm}: {way} {found[way]:,} bytes, counted {counted:,}")
        assert counted < found[way] < 1.01 * counted + ASKED
