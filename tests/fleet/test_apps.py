"""How the server reaches sites by Flower's grid."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("flwr", reason="a fleet needs flwr: pip install 'fedlens[fleet]'")

from fedlens.fleet import apps
from fedlens.fleet.apps import FlowerSites, _arrived
from fedlens.fleet.messages import packed, unpacked
from fedlens.fleet.payload import read, written


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


class Holding(Grid):
    """The reply to message 0 is here in part: whoever pulls it waits for the rest."""

    def __init__(self):
        super().__init__()
        self.whole, self.calls = threading.Event(), list[tuple[str, ...]]()

    def pull_messages(self, ids):
        self.calls.append(tuple(ids))
        if "0" in ids:
            self.whole.wait(600)
        return [reply_to(one) for one in ids]


def reply_to(one):
    content = packed(*written({"of": one}, {}))
    return SimpleNamespace(
        has_error=lambda: False, content=content, metadata=SimpleNamespace(reply_to_message_id=one)
    )


def test_a_reply_that_stays_half_sent_holds_up_no_other(monkeypatch):
    for name, value in (("LOOK", 0.0), ("LONG", 0.2), ("SOON", 0.2)):
        monkeypatch.setattr(apps, name, value)
    monkeypatch.setattr(apps, "Message", lambda *_, **__: None)
    grid: Any = Holding()
    sites = FlowerSites(grid, lambda: [10, 20])
    sites.online()
    sites.send("train", {0: {}, 1: {}}, {}, 60.0)
    assert sites.arrived() == [], "nobody knows yet which one it is"
    ((client, reply),) = sites.arrived()
    assert (client, reply.facts) == (1, {"of": "1"})
    assert sites.arrived() == []
    assert grid.calls == [("0", "1"), ("0",), ("1",)]
    grid.whole.set()
    ((client, reply),) = sites.arrived()
    assert (client, reply.facts) == (0, {"of": "0"})
    assert not sites.pulls
    sites.send("train", {0: {}}, {}, 60.0)
    assert [client for client, _ in sites.arrived()] == [0]
    assert len(grid.calls[-1]) == 1


def test_what_goes_wrong_with_the_connection_ends_the_run(monkeypatch):
    monkeypatch.setattr(apps, "Message", lambda *_, **__: None)
    grid: Any = Grid()

    def gone(ids):
        raise ConnectionError

    grid.pull_messages = gone
    sites = FlowerSites(grid, lambda: [10])
    sites.online()
    sites.send("train", {0: {}}, {}, 60.0)
    with pytest.raises(ConnectionError):
        sites.arrived()


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
