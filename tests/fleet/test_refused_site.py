"""How long a site goes on whose key the server refuses, on a clock that passes when it sleeps."""

import pytest

from fedlens.fleet import CA
from fedlens.fleet.join import join
from fedlens.fleet.keys import make_site_key
from tests.data.test_layouts import write

WHY = "the clock of ann is 400 s behind this server's: set both by a time server"


class Clock:
    now = 0.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


@pytest.fixture
def gives_up_after(tmp_path, monkeypatch):
    """When a site gives up, whose nodes are each let in for so many seconds, then refused."""
    clock = Clock()
    photos = write(tmp_path / "photos", ("cat",))
    make_site_key(tmp_path, "ann")
    (tmp_path / CA).touch()
    monkeypatch.setattr("fedlens.fleet.join.time", clock)
    monkeypatch.setattr("fedlens.fleet.join.find_server", lambda *_: None)
    monkeypatch.setattr("fedlens.fleet.join.end", lambda _: None)

    def seconds(wait, let_in=()):
        each, told = iter(let_in), list[str]()

        class Node:
            def __init__(self, *places, cache):
                self.log, self.last = places[-1], clock.now + 1 + next(each, 0)

            def poll(self):
                if clock.now < self.last:
                    return None
                with self.log.open("a") as file:
                    file.write(f"Exit Code: 305\n[code: 2004] {WHY}\n")
                return 1

        monkeypatch.setattr("fedlens.fleet.join.start_node", Node)
        with pytest.raises(ValueError, match=r"400 s.*ann"):
            join(tmp_path, "ann", photos, "10.0.0.1:9092", "cpu", wait, told.append)
        assert told == [f"not connected (the server says: {WHY}); trying again"]
        return clock.now

    return seconds


@pytest.mark.parametrize(("wait", "expected"), [(0, 100), (500, 500), (3600, 3600)])
def test_it_waits_as_long_as_it_is_told_and_longer_than_a_dead_node_is_held_for(
    gives_up_after, wait, expected
):
    assert expected < gives_up_after(wait) < expected + 20


def test_one_that_was_let_in_before_is_tried_again(gives_up_after):
    assert 5000 + 100 < gives_up_after(0, let_in=[5000]) < 5000 + 120
