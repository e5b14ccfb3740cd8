"""How the server reaches sites by Flower's grid."""

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("flwr", reason="a fleet needs flwr: pip install 'fedlens[fleet]'")

import httpx

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
    sites.forget()


class Holding(Grid):
    """The reply to message 0 is here in part: whoever pulls it waits for the rest.

    As at Flower, a reply is given to the first who asks, and all others are told at once that there
    is none.
    """

    def __init__(self):
        super().__init__()
        self.whole, self.taken, self.calls = threading.Event(), set[str](), list[list[str]]()

    def pull_messages(self, ids):
        self.calls.append([*ids])
        here = [one for one in ids if one not in self.taken]
        self.taken |= {*ids}
        if "0" in here:
            self.whole.wait(600)
        return [reply_to(one, one not in here) for one in ids]


def reply_to(one, is_gone=False):
    content = packed(*written({"of": one}, {}))
    return SimpleNamespace(
        has_error=lambda: is_gone,
        error=SimpleNamespace(code=3, reason="unavailable"),
        content=content,
        metadata=SimpleNamespace(reply_to_message_id=one),
    )


def next_of(sites, looks=1):
    """What arrives next; the pulls that are begun, after at least so many looks."""
    found = list[Any]()
    while looks > 0 or not found:
        found += sites.arrived()
        looks -= 1
        time.sleep(0.01)
    return found


def test_a_reply_that_takes_long_is_not_late_and_holds_up_no_other(monkeypatch):
    monkeypatch.setattr(apps, "LOOK", 0.0)
    monkeypatch.setattr(apps, "Message", lambda *_, **__: None)
    grid: Any = Holding()
    sites = FlowerSites(grid, lambda: [10, 20])
    sites.online()
    sites.send("train", {0: {}, 1: {}}, {}, 60.0)
    ((client, reply),) = next_of(sites, looks=50)
    assert (client, reply.failed, reply.facts) == (1, None, {"of": "1"})
    assert sites.arrived() == []
    grid.whole.set()
    ((client, reply),) = next_of(sites)
    assert (client, reply.failed, reply.facts) == (0, None, {"of": "0"})
    assert sorted(grid.calls) == [["0"], ["1"]], "a second would be told that there is no reply"
    assert not sites.waiting


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
        next_of(sites)


def test_a_site_whose_reply_flower_has_lost_is_asked_again(monkeypatch):
    """Its database was busy when the reply was to be taken out."""
    monkeypatch.setattr(apps, "Message", lambda *_, **__: None)
    grid: Any = Grid()

    def busy(ids):
        request = httpx.Request("POST", "https://127.0.0.1/v1/runtime/pull-messages")
        raise httpx.HTTPStatusError("500", request=request, response=httpx.Response(500))

    grid.pull_messages = busy
    sites = FlowerSites(grid, lambda: [10])
    sites.online()
    sites.send("train", {0: {}}, {}, 60.0)
    ((client, reply),) = next_of(sites)
    assert (client, reply.failed) == (0, "dropped")


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
