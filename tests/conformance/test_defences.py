"""Defences against what clients send: what each promises, and the numbers of byzfl."""

import json
from pathlib import Path

import pytest
import torch

from fedlens.algorithm import compose
from fedlens.algorithms import (
    caf,
    centred_clipping,
    dnc,
    geometric_median,
    krum,
    mda,
    median,
    trimmed_mean,
)
from fedlens.algorithms.trust import largest, products_about_mean, squared_distances
from tests.conformance.quadratics import DOUBLE, close, plain
from tests.conformance.test_robust import combine, some_updates

BYZFL = json.loads(Path(__file__).with_name("byzfl.json").read_text())
INPUTS = {name: torch.tensor(rows, dtype=DOUBLE) for name, rows in BYZFL["inputs"].items()}


@pytest.mark.parametrize(
    ("name", "made", "given"),
    [
        ("trimmed-mean", trimmed_mean(2 / 9), "random"),
        ("median", median(), "random"),
        ("krum", krum(2), "random"),
        ("multi-krum", krum(2, keep=6), "random"),
        ("geometric-median", geometric_median(iterations=2000), "random"),
        ("centred-clipping", centred_clipping(radius=1.0, iterations=3), "random"),
        ("mda", mda(2), "planted"),
        ("caf", caf(2), "line"),
    ],
)
def test_a_defence_gives_what_byzfl_gives(name, made, given):
    close(combine(made, INPUTS[given]), torch.tensor(BYZFL["outputs"][name], dtype=DOUBLE), 1e-9)


AMONG = 11  # clients
HOSTILE = {
    "geometric-median": (geometric_median(), 5),
    "krum": (krum(4), 4),
    "multi-krum": (krum(3, keep=5), 3),
    "mda": (mda(5), 5),
    "caf": (caf(3), 3),
    "dnc": (dnc(3), 3),
}
"""Each defence, and how many hostile clients of eleven it withstands."""


@pytest.mark.parametrize("name", HOSTILE)
def test_the_numbers_of_clients_play_no_role(name):
    updates, made = some_updates(AMONG), HOSTILE[name][0]
    order = torch.randperm(AMONG, generator=torch.Generator().manual_seed(1))
    close(combine(made, updates[order]), combine(made, updates), 1e-10)


@pytest.mark.parametrize("name", HOSTILE)
def test_moving_and_scaling_all_updates_moves_and_scales_what_a_defence_gives(name):
    updates, made = some_updates(AMONG), HOSTILE[name][0]
    moved = 3 * updates + torch.linspace(-100, 100, 5, dtype=DOUBLE)
    expected = 3 * combine(made, updates) + torch.linspace(-100, 100, 5, dtype=DOUBLE)
    close(combine(made, moved), expected, 1e-8)


def far_off(hostile, distance, seed=0):
    """Honest updates, and colluding ones that lie together far away."""
    updates = some_updates(AMONG, seed)
    updates[:hostile] = distance + 0.01 * updates[:hostile]
    return updates


@pytest.mark.parametrize("distance", [10.0, 1e3, 1e6, 1e9])
@pytest.mark.parametrize("name", HOSTILE)
def test_as_many_hostile_clients_as_a_defence_withstands_move_it_little(name, distance):
    """By no more than a geometric median may: 2 (n - f) / (n - 2 f) times the honest radius."""
    made, count = HOSTILE[name]
    updates = far_off(count, distance)
    honest = updates[count:]
    centre = honest.mean(0)
    radius = (honest - centre).norm(dim=1).max()
    bound = 2 * (AMONG - count) / (AMONG - 2 * count) * radius
    assert (combine(made, updates) - centre).norm() <= bound


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_majority_has_its_way(name):
    found = combine(HOSTILE[name][0], far_off(6, 1e6))
    assert found.norm() > 1e5


@pytest.mark.parametrize("name", HOSTILE)
def test_clients_that_agree_are_followed_by_every_defence(name):
    updates = some_updates(1).expand(AMONG, -1)
    close(combine(HOSTILE[name][0], updates), updates[0])


def test_distances_are_exact_though_updates_are_long_and_near_each_other():
    near = 1e6 + 1e-3 * some_updates(8)
    near[3] = -1e12  # whose length must not cost the others their digits
    found = squared_distances({"w": near[:, :2], "b": near[:, 2:]})
    rows = [0, 1, 2, 4, 5, 6, 7]
    expected = (near[rows][:, None] - near[rows][None]).square().sum(2)
    close(found[rows][:, rows], expected, 1e-6 * float(expected.max()))


def test_products_about_a_mean_and_their_largest_direction_are_those_of_the_vectors():
    updates, weights = some_updates(7), torch.rand(7, dtype=DOUBLE)
    weights /= weights.sum()
    away = updates - weights @ updates
    products = products_about_mean(squared_distances({"w": updates}), weights)
    close(products, away @ away.T, 1e-12)
    values, vectors = torch.linalg.eigh(products)
    close((vectors[:, -1] @ largest(products)).abs(), torch.ones((), dtype=DOUBLE), 1e-6)
    assert values[-1] > values[-2]


def test_the_geometric_median_has_the_least_sum_of_distances():
    updates = some_updates(AMONG)
    found = combine(geometric_median(iterations=1000), updates)

    def total(point):
        return (updates - point).norm(dim=1).sum()

    for seed in range(20):
        step = 1e-3 * some_updates(1, seed)[0]
        assert total(found) < total(found + step)


def test_the_smallest_diameter_is_that_of_all_subsets():
    updates = some_updates(7)
    updates[[1, 5]] += 4
    close(combine(mda(2), updates), updates[[0, 2, 3, 4, 6]].mean(0))


@pytest.mark.parametrize("made", [mda, caf, dnc])
def test_more_hostile_clients_than_a_defence_can_have_are_refused(made):
    compose(plain(5), made(2))
    with pytest.raises(ValueError, match="choose at most 2, or more clients"):
        compose(plain(5), made(3))


def test_subsets_that_nobody_can_compare_are_refused():
    compose(plain(25), mda(5))
    with pytest.raises(ValueError, match="mda compares"):
        compose(plain(40), mda(10))


@pytest.mark.parametrize(("option", "word"), [("smoothing", "smoothing"), ("iterations", "steps")])
def test_a_geometric_median_of_no_smoothing_or_no_steps_is_refused(option, word):
    with pytest.raises(ValueError, match=option):
        compose(plain(5), geometric_median(**{option: 0}))
