"""Median, trimmed mean, Krum and Multi-Krum, against NumPy and by their own promises."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedlens.algorithm import compose
from fedlens.algorithm.slots import Received
from fedlens.algorithms import bucketing, centred_clipping, fedns, krum, median, trimmed_mean
from fedlens.core import Cohort, keys
from fedlens.network.layout import Entry, Layout
from tests.conformance.quadratics import DOUBLE, Quadratics, close, end, local_steps, plain, some

COHORTS = st.integers(3, 12)


LAYOUT = Layout(
    {
        "w": Entry("", "weight", 0),
        "b": Entry("", "bias", 0),
        "running_mean": Entry("", "buffer", 0),
    },
    {},
    None,
)


def combine(made, updates):
    """What `made` makes of these updates [C, D], split over two tensors."""
    found = combine_trees(made, {"w": updates[:, :2].clone(), "b": updates[:, 2:].clone()})
    return torch.cat([found["w"], found["b"]])


def combine_trees(made, tree):
    number = len(tree["w"])
    ones = torch.ones(number, dtype=torch.int64)
    shares = torch.full((number,), 1 / number, dtype=DOUBLE)
    cohort = Cohort(torch.arange(number), ones, ones, shares, None, number, number)
    made = made if isinstance(made, tuple) else (made,)
    slot = compose(plain(number), *made).combine
    memory = slot.init({name: u[0] for name, u in tree.items() if name != "running_mean"})
    return slot.update(Received(tree, shares, cohort, LAYOUT, memory, keys.root(3)))[0]


def some_updates(clients, seed=0):
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(clients, 5, generator=rng, dtype=DOUBLE)


@settings(max_examples=30, deadline=None)
@given(COHORTS, st.integers(0, 10_000))
def test_the_median_is_numpys(clients, seed):
    updates = some_updates(clients, seed)
    close(combine(median(), updates), torch.tensor(np.median(updates.numpy(), 0)))


@settings(max_examples=30, deadline=None)
@given(COHORTS, st.integers(0, 10_000), st.sampled_from([0.0, 0.1, 0.2, 0.25, 0.4, 0.49]))
def test_the_trimmed_mean_leaves_a_share_out_at_each_end(clients, seed, share):
    updates = some_updates(clients, seed)
    cut = int(np.floor(share * clients + 1e-9))
    ordered = np.sort(updates.numpy(), 0)
    expected = torch.tensor(ordered[cut : clients - cut].mean(0))
    close(combine(trimmed_mean(share), updates), expected)


def test_a_share_of_zero_is_the_plain_mean():
    updates = some_updates(7)
    close(combine(trimmed_mean(0.0), updates), updates.mean(0))


@pytest.mark.parametrize(("share", "cut"), [(0.29, 29), (0.07, 7), (0.285, 28)])
def test_shares_that_are_whole_clients_are_not_lost_to_rounding(share, cut):
    """0.29 * 100 is 28.999999999999996 in floating point."""
    updates = some_updates(100)
    ordered = updates.sort(0).values
    close(combine(trimmed_mean(share), updates), ordered[cut : 100 - cut].mean(0))


def krum_in_numpy(updates, byzantine, keep):
    return updates[krum_choice(updates, byzantine)[:keep]].mean(0)


def krum_choice(updates, byzantine):
    """The clients, the best first."""
    number = len(updates)
    scores = []
    for i in range(number):
        distances = sorted(
            float(((updates[i] - updates[j]) ** 2).sum()) for j in range(number) if j != i
        )
        scores.append(sum(distances[: number - byzantine - 2]))
    return np.argsort(scores, kind="stable")


@settings(max_examples=30, deadline=None)
@given(st.integers(7, 12), st.integers(0, 10_000), st.integers(0, 2), st.integers(1, 4))
def test_krum_is_the_papers_score(clients, seed, byzantine, keep):
    updates = some_updates(clients, seed)
    expected = torch.tensor(krum_in_numpy(updates.numpy(), byzantine, keep))
    close(combine(krum(byzantine, keep), updates), expected)


ROBUST = {
    "median": median(),
    "trimmed mean": trimmed_mean(0.2),
    "krum": krum(2),
    "multi-krum": krum(2, keep=4),
}


@pytest.mark.parametrize("name", ROBUST)
def test_a_fifth_of_huge_updates_does_not_matter(name):
    updates = some_updates(10)
    updates[3], updates[7] = 1e9, 1e9 + 1
    found = combine(ROBUST[name], updates)
    honest = updates[[0, 1, 2, 4, 5, 6, 8, 9]]
    assert (found <= honest.amax(0)).all() and (found >= honest.amin(0)).all()
    assert updates.mean(0).abs().min() > 1e8


def test_krum_picks_a_client_inside_the_cluster():
    cluster = 0.01 * some_updates(7)
    stray = torch.tensor([5.0, -6.0, 7.0], dtype=DOUBLE)[:, None].expand(3, 5)
    found = combine(krum(3), torch.cat([stray, cluster]))
    assert any(torch.equal(found, one) for one in cluster)
    centre = cluster.mean(0)
    assert (found - centre).norm() <= (cluster - centre).norm(dim=1).median()


@pytest.mark.parametrize("keep", [1, 3])
def test_krum_judges_clients_by_parameters_and_takes_the_median_of_statistics(keep):
    updates, rng = some_updates(9), torch.Generator().manual_seed(1)
    seen = 1e3 * torch.randn(9, 4, generator=rng, dtype=DOUBLE)
    seen[int(krum_choice(updates.numpy(), 2)[0])] = 1e9  # near the others, and hostile all the same
    tree = {"w": updates[:, :2].clone(), "b": updates[:, 2:].clone(), "running_mean": seen.clone()}
    found = combine_trees(krum(2, keep), tree)
    expected = torch.tensor(krum_in_numpy(updates.numpy(), 2, keep))
    close(torch.cat([found["w"], found["b"]]), expected)
    close(found["running_mean"], torch.tensor(np.median(seen.numpy(), 0)))


@pytest.mark.parametrize("name", ROBUST)
def test_clients_that_agree_are_followed(name):
    updates = some_updates(1).expand(10, -1)
    close(combine(ROBUST[name], updates), updates[0])


@pytest.mark.parametrize("name", ["median", "trimmed mean"])
def test_moving_and_scaling_all_updates_moves_and_scales_the_result(name):
    updates = some_updates(10)
    close(combine(ROBUST[name], 3 * updates - 2), 3 * combine(ROBUST[name], updates) - 2)


def test_a_hostile_client_ruins_fedavg_and_not_the_median():
    """Through whole rounds: one of seven clients claims a minimum a million away."""
    problem = some(7, spread=0.1, equal=True)
    c = problem.c.clone()
    c[2] = 1e6
    hostile = Quadratics(problem.a, c, problem.sizes, problem.start)
    for made in (median(), trimmed_mean(0.2), krum(1)):
        assert end(compose(plain(7, 0.3, 3), made), hostile, 20).abs().max() < 1
    assert end(plain(7, 0.3, 3), hostile, 20).abs().min() > 1e4


def test_a_round_of_the_median_is_that_of_the_clients_models():
    problem = some(5)
    local = local_steps(problem, problem.start, 0.1, 2)
    close(end(compose(plain(5, 0.1, 2), median()), problem), local.median(0).values)


def test_krum_needs_more_than_twice_the_hostile_clients_and_two():
    compose(plain(5), krum(1))
    with pytest.raises(ValueError, match="choose at most 0, or more clients"):
        compose(plain(4), krum(1))
    for keep in (0, 6):
        with pytest.raises(ValueError, match=f"keep is {keep}: choose 1 to 5"):
            compose(plain(5), krum(1, keep))


def test_a_share_of_half_or_more_is_refused():
    for share in (0.5, -0.1, 0.9):
        with pytest.raises(ValueError, match=r"0\.5"):
            compose(plain(5), trimmed_mean(share))


def test_centred_clipping_within_its_radius_is_the_mean_and_beyond_it_moves_by_the_radius():
    updates = some_updates(7)
    close(combine(centred_clipping(radius=100.0), updates), updates.mean(0))
    updates[0] = 1e9
    moved = combine(centred_clipping(radius=1e-3), updates)
    assert float(moved.norm()) <= 1e-3 * (1 + 1e-12)


def test_centred_clipping_goes_on_from_the_last_round():
    problem = some(5, equal=True)
    one = end(compose(plain(5, 0.1), centred_clipping(radius=0.05)), problem, 30)
    far = end(compose(plain(5, 0.1), centred_clipping(radius=1e9)), problem, 30)
    close(far, end(plain(5, 0.1), problem, 30), 1e-10)
    # Its memory follows the honest mean, though no single round may move it far.
    assert float((one - far).norm()) < float((problem.start - far).norm()) / 2


@pytest.mark.parametrize("size", [1, 2, 3, 9])
def test_bucketing_of_the_mean_of_buckets(size):
    """A trimmed mean that trims nothing is the mean: of equal buckets, that of all clients."""
    updates = some_updates(9 if size != 2 else 8)
    close(combine((trimmed_mean(share=0.0), bucketing(size=size)), updates), updates.mean(0))


def test_bucketing_with_buckets_of_one_is_what_it_wraps():
    updates = some_updates(9)
    close(combine((median(), bucketing(size=1)), updates), combine(median(), updates))


def test_one_hostile_client_spoils_one_bucket():
    updates = some_updates(10)
    updates[4] = 1e12
    assert float(combine((median(), bucketing(size=2)), updates).abs().max()) < 10


@pytest.mark.parametrize(
    ("papers", "word"),
    [
        ((fedns(), bucketing(size=2)), "bucketing"),
        ((median(), bucketing(size=0)), "size"),
        ((krum(byzantine=2), bucketing(size=4)), "buckets"),
        ((bucketing(size=2), median()), "refill"),
        ((centred_clipping(iterations=0),), "iterations"),
    ],
)
def test_bucketing_of_what_it_cannot_go_before_is_refused(papers, word):
    with pytest.raises(ValueError, match=word):
        compose(plain(12), *papers)
