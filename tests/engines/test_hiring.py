"""Who is hired of the actors that are asked, if some are lost on the way or there is no node."""

from typing import Any

import pytest

from fedlens.engines import hiring
from fedlens.engines.cluster import HeadLost
from fedlens.engines.hiring import Hired, Hiring


class Lost(Exception):
    pass


class Cluster:
    """In the place of Ray: actors become ready one after another, each as `outcomes` says."""

    class exceptions:
        RayError = Lost

    def __init__(self, num_nodes: list[int], outcomes: list[str]) -> None:
        self.num_nodes, self.outcomes = num_nodes, outcomes  # at each look the nodes that live
        self.killed: list[int] = []
        self.ready, self.waits = 1, 0  # how many at a time, and how often there are none before

    def nodes(self) -> list[dict[str, Any]]:
        count = self.num_nodes.pop(0) if len(self.num_nodes) > 1 else self.num_nodes[0]
        one = {"Alive": True, "Resources": {"CPU": 1}}
        return [{**one, "NodeID": f"node {n}"} for n in range(count)]

    def remote(self, actor: type) -> type:
        return actor

    def put(self, value: Any) -> Any:
        return value

    def wait(
        self, actors: list[int], num_returns: int = 1, timeout: float = 0.0
    ) -> tuple[list[int], list[int]]:
        if not timeout or self.waits:
            self.waits -= bool(timeout)
            return [], actors
        return actors[: self.ready], actors[self.ready :]

    def get(self, actor: int) -> str:
        if self.outcomes[actor] == "lost":
            raise Lost("it died")
        return self.outcomes[actor]

    def kill(self, actor: int) -> None:
        self.killed.append(actor)


@pytest.fixture(autouse=True)
def numbered(monkeypatch):
    """Actors are numbers here; nobody waits for nodes."""

    def hire(self: Any, node: str) -> Hired:
        self.count = getattr(self, "count", -1) + 1
        return Hired(self.count, node, self.count, self.count)

    monkeypatch.setattr(Hiring, "_hire", hire)
    monkeypatch.setattr(hiring, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(hiring, "check_head", lambda _ray: None)


def hired(cluster: Cluster, most: int = 9) -> list[int]:
    found = Hiring(cluster, object, (), None, on_gpus=False)
    found.hire(most)
    return [one.handle for one in found.hired]


def test_who_is_lost_on_the_way_does_not_end_the_run_while_others_come():
    cluster = Cluster([3], ["lost", "lost", ""])
    assert hired(cluster) == [2]
    assert cluster.killed == [0, 1]


def test_if_all_are_lost_others_are_asked():
    assert hired(Cluster([2, 1], ["lost", "lost", ""])) == [2]


def test_workers_that_are_always_lost_are_not_asked_for_ever():
    cluster = Cluster([2], ["lost"] * 6)
    with pytest.raises(ValueError, match="could be started on the Ray cluster: it died"):
        hired(cluster)
    assert cluster.killed == [*range(6)]


def test_a_mistake_is_told_at_once_if_nobody_else_comes():
    cluster = Cluster([2], ["copy the data folder there", "lost"])
    with pytest.raises(ValueError, match="copy the data folder there"):
        hired(cluster)
    assert hired(Cluster([2], ["copy the data folder there", ""])) == [1]


def test_a_node_that_joins_is_waited_for():
    assert hired(Cluster([0, 0, 0, 1], [""])) == [0]


def test_nobody_is_waited_for_in_vain(monkeypatch):
    monkeypatch.setattr(hiring, "FIRST_SECONDS", 0.0)
    with pytest.raises(ChildProcessError, match="wait for others, or add nodes"):
        hired(Cluster([0], []))


def test_a_node_that_cannot_be_used_is_told_of_and_asked_no_more(caplog):
    cluster = Cluster([2], ["it has torch 1.9", "", ""])
    found = Hiring(cluster, object, (), None, on_gpus=False)
    cluster.ready = 2
    found.hire(9)
    found.hire(9)
    assert [one.node for one in found.hired] == ["node 1"]
    assert cluster.killed == [0]
    assert caplog.messages == ["a node of the Ray cluster is not used: it has torch 1.9"]
    assert caplog.records[0].once, "every point of a sweep hires anew"


def test_a_cluster_without_a_head_is_left_before_it_ends_this_process(monkeypatch):
    class Lonely(Cluster):
        is_left = False

        def shutdown(self) -> None:
            self.is_left = True

    def gone(ray: Any) -> None:
        raise HeadLost("it is gone")

    monkeypatch.setattr(hiring, "check_head", gone)
    cluster = Lonely([1], [""])
    with pytest.raises(HeadLost):
        hired(cluster)
    assert cluster.is_left


def test_a_cluster_that_is_waited_for_is_told_of_once(caplog):
    cluster = Cluster([1], [""])
    cluster.waits = 3
    assert hired(cluster) == [0]
    said = "waiting for the Ray cluster: its cores are at work, or slow to start"
    assert caplog.messages == [said]
