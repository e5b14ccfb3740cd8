"""The cost of a round on a cluster: what stands on paper is what a simulation comes to."""

import itertools

import pytest

from cluster_rounds import Cluster, on_paper, simulated


def test_the_model_on_paper_is_near_what_is_simulated():
    for nodes, clients in itertools.product((1, 3, 10, 30, 100), (1_000, 10_000, 100_000)):
        cluster = Cluster(nodes, clients=clients)
        assert on_paper(cluster) == pytest.approx(simulated(cluster), rel=0.25), cluster


def test_more_nodes_help_until_the_link_is_full():
    by_nodes = [simulated(Cluster(nodes, clients=10_000)) for nodes in (1, 3, 10)]
    assert by_nodes == sorted(by_nodes, reverse=True)
    full = Cluster(100, clients=10_000)
    assert simulated(full) > full.tasks * full.up / full.link
