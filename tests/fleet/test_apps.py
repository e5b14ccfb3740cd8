"""How the server reaches sites by Flower's grid."""

from types import SimpleNamespace

import pytest

pytest.importorskip("flwr", reason="a fleet needs flwr: pip install 'fedlens[fleet]'")

from fedlens.fleet import apps
from fedlens.fleet.apps import FlowerSites, _arrived
from fedlens.fleet.messages import unpacked
from fedlens.fleet.payload import read


class Grid:
    """Two nodes that never answer; `started` says when each was."""

    def __init__(self):
        self.started = {10: "at first", 20: "at first"}
        self.pushed = 0

    def get_nodes(self):
        return [
            SimpleNamespace(node_id=node, last_activated_at=when)
            for node, when in self.started.items()
        ]

    def push_messages(self, messages):
        first, self.pushed = self.pushed, self.pushed + len(messages)
        return [str(number) for number in range(first, self.pushed)]

    def pull_messages(self, ids):
        return []


def test_a_site_that_was_started_again_is_not_waited_for(monkeypatch):
    """It was away for less than the time between two looks, so Flower will say nothing of it."""
    monkeypatch.setattr(apps, "LOOK", 0.0)
    monkeypatch.setattr(apps, "Message", lambda *_, **__: None)  # Flower's are those of a run
    grid = Grid()
    sites = FlowerSites(grid, lambda: [10, 20])
    assert sites.online() == {0, 1}
    sites.send("train", {0: {}, 1: {}}, {}, 60.0)
    assert sites.arrived() == []
    grid.started[20] = "again"
    ((client, arrived),) = sites.arrived()
    assert (client, arrived.failed) == (1, "dropped")
    assert sites.arrived() == []
    sites.send("train", {1: {}}, {}, 60.0)
    assert sites.arrived() == []
    del grid.started[10]  # this Flower does tell
    assert sites.arrived() == []
    assert sites.online() == {1}


def test_a_site_that_is_gone_is_told_of_in_our_words():
    said = "Error: Node Unavailable — The destination node failed to report a heartbeat."
    reply = SimpleNamespace(has_error=lambda: True, error=SimpleNamespace(code=5, reason=said))
    assert _arrived(reply)[2:] == ("dropped", "it is not there any more")
    reply.error.code = 2
    assert _arrived(reply)[2:] == ("raised", said)


@pytest.mark.parametrize("text", ["", "[" * 100_000, "9" * 5000, "1"])
def test_a_message_that_cannot_be_read_is_malformed_and_ends_nothing(text):
    with pytest.raises(ValueError):
        read(*unpacked({"facts": {"json": text, "tensors": b""}}))
