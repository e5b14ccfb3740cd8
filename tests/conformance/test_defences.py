"""Defences against what clients send: what each promises, and the numbers of byzfl."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from fedlens.algorithm import compose
from fedlens.algorithm.secure import with_secure_sums
from fedlens.algorithms import (
    bucketing,
    bulyan,
    caf,
    centred_clipping,
    columns,
    dnc,
    fedns,
    fltrust,
    geometric_median,
    krum,
    mda,
    meamed,
    median,
    nnm,
    norm_bound,
    sign_guard,
    trimmed_mean,
)
from fedlens.algorithms.distances import products_about_mean, squared_distances
from fedlens.algorithms.fltrust import WithRoot
from fedlens.algorithms.meamed import around_median
from fedlens.algorithms.median import middle
from fedlens.algorithms.sign_guard import largest_cluster, sign_shares
from fedlens.algorithms.trust import largest
from fedlens.core import keys
from tests.conformance.quadratics import DOUBLE, close, path, plain, some
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
        ("meamed", meamed(2), "random"),
        ("nnm, then median", (median(), nnm(2)), "random"),
        ("nnm, then trimmed-mean", (trimmed_mean(2 / 9), nnm(2)), "random"),
    ],
)
def test_a_defence_gives_what_byzfl_gives(name, made, given):
    close(combine(made, INPUTS[given]), torch.tensor(BYZFL["outputs"][name], dtype=DOUBLE), 1e-9)


AMONG = 11  # clients
MOVES = {
    "median": (median(), 5),
    "trimmed-mean": (trimmed_mean(4 / 11), 4),
    "meamed": (meamed(5), 5),
    "bulyan": (bulyan(2), 2),
    "nnm x trimmed-mean": ((trimmed_mean(3 / 11), nnm(3)), 3),
    "bucketing x median": ((median(), bucketing(1)), 5),
    "geometric-median": (geometric_median(), 5),
    "krum": (krum(4), 4),
    "multi-krum": (krum(3, keep=5), 3),
    "mda": (mda(5), 5),
    "caf": (caf(3), 3),
    "dnc": (dnc(3), 3),
}
SCALES = {
    "fltrust": (fltrust(root=10), 5),
    "sign-guard": (sign_guard(), 5),
    "norm-bound": (norm_bound(), 5),
}
HOSTILE = MOVES | SCALES
"""Each defence, and how many hostile clients of eleven it withstands. Where 0 lies matters to those
that only scale: they compare lengths, directions or signs."""


@pytest.mark.parametrize("name", HOSTILE)
def test_the_numbers_of_clients_play_no_role(name):
    updates, made = some_updates(AMONG), HOSTILE[name][0]
    order = torch.randperm(AMONG - 1, generator=torch.Generator().manual_seed(1))
    order = torch.cat([order, torch.tensor([10])])  # the root stays who it is
    close(combine(made, updates[order]), combine(made, updates), 1e-10)


@pytest.mark.parametrize("name", HOSTILE)
def test_scaling_all_updates_scales_what_a_defence_gives(name):
    updates, made = some_updates(AMONG), HOSTILE[name][0]
    close(combine(made, 3 * updates), 3 * combine(made, updates), 1e-10)


@pytest.mark.parametrize("name", MOVES)
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
def test_a_defence_says_how_many_hostile_clients_it_withstands(name):
    made, count = HOSTILE[name]
    made = made if isinstance(made, tuple) else (made,)
    most = compose(plain(AMONG), *made).combine.withstands(AMONG)
    assert (most is None) if name == "norm-bound" else (most or 0) >= count


@pytest.mark.parametrize("name", MOVES)
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


@pytest.mark.parametrize("length", [0.0, 3.0, 14.0, 15.0, 1e5])
def test_distances_keep_twelve_digits_however_long_what_updates_share_is(length):
    drawn = torch.Generator().manual_seed(3)
    shared, *own = torch.randn(10, 4000, generator=drawn, dtype=DOUBLE)
    updates = length * shared + torch.stack(own)
    expected = (updates[:, None] - updates).square().sum(2)
    found = squared_distances({"w": updates})
    close(found, expected, 1e-12 * float(expected.max()))


@pytest.mark.parametrize("cores", [1, 3])
def test_many_columns_are_looked_at_on_all_cores_and_give_the_same_on_one(cores, monkeypatch):
    rows = torch.randn(60, 80_001, generator=torch.Generator().manual_seed(0), dtype=DOUBLE)
    monkeypatch.setattr(columns, "num_cores", lambda: 2)
    before = [middle(rows), squared_distances({"w": rows})]
    close(before[0], torch.from_numpy(np.median(rows.numpy(), 0)), 0)
    close(before[1][:3], torch.cdist(rows[:3], rows).square(), 1e-9)
    monkeypatch.setattr(columns, "num_cores", lambda: cores)
    after = [middle(rows), squared_distances({"w": rows})]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


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


def test_bulyan_is_the_papers_choice_of_choices():
    updates, f, left = some_updates(11), 2, [*range(11)]
    chosen: list[int] = []
    while len(chosen) < 11 - 2 * f:
        scores = []
        for i in left:
            away = sorted(float((updates[i] - updates[j]).square().sum()) for j in left if j != i)
            every = float((updates[i] - updates).square().sum())
            scores.append((round(sum(away[: max(len(left) - f - 2, 1)]), 9), every))
        chosen.append(left.pop(scores.index(min(scores))))
    values = updates[chosen]
    near = (values - values.median(0).values).abs().argsort(0)[: 11 - 4 * f]
    close(combine(bulyan(f), updates), values.gather(0, near).mean(0))


def test_values_near_the_median_do_not_depend_on_rounding():
    """Of two that are as near as each other, all but for rounding, it is the lower one."""
    values = torch.tensor([[1.0, 1.0, 3.0, 3.0, 3.0], [1.0, 2.0, 3.0, 4.0, 5.0]], dtype=DOUBLE).T
    for seed in range(20):
        noise = torch.randn(5, 2, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE)
        found = around_median(values * (1 + 1e-15 * noise), 4)
        close(found, torch.tensor([10 / 4, 10 / 4], dtype=DOUBLE), 1e-12)


def test_fltrust_weighs_by_agreement_with_its_root():
    updates = some_updates(6)
    root, others = updates[2], updates[[0, 1, 3, 4, 5]]
    agrees = torch.cosine_similarity(others, root[None]).clamp(min=0)
    alike = others * root.norm() / others.norm(dim=1, keepdim=True)
    close(combine(fltrust(root=2), updates), agrees @ alike / agrees.sum())


def test_nobody_who_agrees_with_the_root_moves_nothing():
    updates = torch.cat([some_updates(1), -some_updates(1).expand(4, -1)])
    close(combine(fltrust(), updates), torch.zeros(5, dtype=DOUBLE))


def test_the_root_takes_part_in_every_round():
    problem = some(9)
    select = WithRoot(plain(4).select, root=7)
    for round in range(20):
        drawn = select(problem.federation, round, keys.root(round)).tolist()
        assert drawn[0] == 7 and len({*drawn}) == 4
        assert select.of_size(2)(problem.federation, round, keys.root(round)).tolist() == drawn[:2]
    with pytest.raises(ValueError, match="choose 0 to 8"):
        WithRoot(plain(4).select, root=9)(problem.federation, 0, keys.root(0))


def test_a_bound_shortens_long_updates_and_leaves_shares_alone():
    updates = some_updates(5)
    close(combine(norm_bound(norm=1e9), updates), updates.mean(0))
    factor = (0.5 / updates.norm(dim=1)).clamp(max=1)
    close(combine(norm_bound(norm=0.5), updates), (factor[:, None] * updates).mean(0))


def test_signs_of_most_clients_are_one_cluster_and_others_are_left_out():
    signs = torch.randn(9, 400, generator=torch.Generator().manual_seed(0), dtype=DOUBLE)
    signs[[3, 7]] = signs[[3, 7]].abs() + 0.1
    shares = sign_shares({"w": signs})
    close(shares.sum(1), torch.ones(9, dtype=DOUBLE))
    assert largest_cluster(shares).nonzero().flatten().tolist() == [0, 1, 2, 4, 5, 6, 8]


def test_lengths_far_from_the_median_are_left_out():
    updates = some_updates(7).abs()  # one cluster of signs
    updates[2] *= 1e-3
    updates[5] *= 1e3
    kept = updates[[0, 1, 3, 4, 6]]
    factor = (updates.norm(dim=1).median() / kept.norm(dim=1)).clamp(max=1)
    close(combine(sign_guard(), updates), (factor[:, None] * kept).mean(0))


def test_mixing_with_nobody_is_what_it_wraps():
    updates = some_updates(9)
    close(combine((median(), nnm(0)), updates), updates.mean(0))
    close(combine((krum(2), nnm(2)), updates[:1].expand(9, -1)), updates[0])


@pytest.mark.parametrize(
    ("papers", "word"),
    [
        ((fedns(), nnm()), "nnm"),
        ((median(), nnm(6)), "choose at most 5"),
        ((bulyan(3),), "choose at most 2"),
        ((meamed(6),), "choose at most 5"),
        ((norm_bound(norm=0),), "norm is 0"),
        ((sign_guard(low=2),), "low is 2"),
        ((fltrust(root=-1),), "root is -1"),
    ],
)
def test_what_a_defence_cannot_do_is_refused(papers, word):
    with pytest.raises(ValueError, match=word):
        compose(plain(12), *papers)


DEFENCES = {**HOSTILE, "centred-clipping": (centred_clipping(), 5)}


@pytest.mark.parametrize("name", DEFENCES)
def test_defences_exclude_secure_sums_and_say_why(name):
    made = DEFENCES[name][0]
    algorithm = compose(plain(AMONG), *(made if isinstance(made, tuple) else (made,)))
    with pytest.raises(ValueError, match="one by one"):
        with_secure_sums(algorithm, clip=1.0, bits=32, cohort=AMONG, threshold=1.0)


def test_momentum_that_clients_send_is_kept_from_round_to_round():
    """With a step a round a client sends -lr m, m = 0.9 m + g: as published tables have it."""
    problem, lr, beta = some(5, equal=True), 0.05, 0.9
    x, m = problem.start, torch.zeros_like(problem.c)
    algorithm = compose(replace(plain(5, lr, momentum=beta), reset=False), median())
    for found in path(algorithm, problem, 6):
        m = beta * m + problem.slopes(x)
        x = x - lr * m.median(0).values
        close(found, x, 1e-10)


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
