"""Which of the actors that are started are used, if some are lost before or there is no node."""

from typing import Any

import pytest

from fedlens.engines import ray as ray_engine
from fedlens.engines.cluster import HeadLost
from fedlens.engines.ray import ActorGroup, RemoteWorker


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

    def start_on(self: Any, node: str) -> RemoteWorker:
        self.count = getattr(self, "count", -1) + 1
        return RemoteWorker(self.count, node, self.count, self.count)

    monkeypatch.setattr(ActorGroup, "_start_on", start_on)
    monkeypatch.setattr(ray_engine, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(ray_engine, "check_head", lambda _ray: None)


def started(cluster: Cluster, most: int = 9) -> list[int]:
    found = ActorGroup(cluster, object, (), None, on_gpus=False)
    found.start(most)
    return [one.handle for one in found.workers]


def test_workers_lost_as_they_start_do_not_end_the_run_while_others_come():
    cluster = Cluster([3], ["lost", "lost", ""])
    assert started(cluster) == [2]
    assert cluster.killed == [0, 1]


def test_if_all_are_lost_others_are_started():
    assert started(Cluster([2, 1], ["lost", "lost", ""])) == [2]


def test_workers_that_are_always_lost_are_not_started_for_ever():
    cluster = Cluster([2], ["lost"] * 6)
    with pytest.raises(ValueError, match="died"):
        started(cluster)
    assert cluster.killed == [*range(6)]


def test_a_mistake_is_told_at_once_if_no_other_worker_comes():
    cluster = Cluster([2], ["copy the data folder there", "lost"])
    with pytest.raises(ValueError, match="copy the data folder there"):
        started(cluster)
    assert started(Cluster([2], ["copy the data folder there", ""])) == [1]


def test_a_node_that_joins_is_waited_for():
    assert started(Cluster([0, 0, 0, 1], [""])) == [0]


def test_no_node_is_waited_for_in_vain(monkeypatch):
    monkeypatch.setattr(ray_engine, "FIRST_SECONDS", 0.0)
    with pytest.raises(ChildProcessError, match="nodes"):
        started(Cluster([0], []))


def test_a_node_that_cannot_be_used_is_told_of_and_tried_no_more(caplog):
    cluster = Cluster([2], ["it has torch 1.9", "", ""])
    found = ActorGroup(cluster, object, (), None, on_gpus=False)
    cluster.ready = 2
    found.start(9)
    found.start(9)
    assert [one.node for one in found.workers] == ["node 1"]
    assert cluster.killed == [0]
    assert caplog.messages == ["a node of the Ray cluster is not used: it has torch 1.9"]
    assert caplog.records[0].once, "every point of a sweep starts its own"


def test_a_cluster_without_a_head_is_left_before_it_ends_this_process(monkeypatch):
    class Lonely(Cluster):
        is_left = False

        def shutdown(self) -> None:
            self.is_left = True

    def gone(ray: Any) -> None:
        raise HeadLost("it is gone")

    monkeypatch.setattr(ray_engine, "check_head", gone)
    cluster = Lonely([1], [""])
    with pytest.raises(HeadLost):
        started(cluster)
    assert cluster.is_left


def test_a_cluster_that_is_waited_for_is_told_of_once(caplog):
    cluster = Cluster([1], [""])
    cluster.waits = 3
    assert started(cluster) == [0]
    said = "waiting for the Ray cluster: its cores are at work, or slow to start"
    assert caplog.messages == [said]
