"""The discrete Gaussian: its bound against exact sums, its sampler against its probabilities."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from fedlens.algorithm.distributed import sample
from fedlens.core.keys import fold, root
from fedlens.privacy.accountant import rdp
from fedlens.privacy.discrete import epsilon
from fedlens.privacy.events import Release


def probabilities(noise, reach):
    """P(-reach), ..., P(reach) of the discrete Gaussian."""
    weights = np.exp(-((np.arange(-reach, reach + 1) / noise) ** 2) / 2)
    return weights / weights.sum()


def exact_delta(noise, clients, moved, at):
    """δ(ε) of a sum of one dimension, all of whose probabilities are convolved."""
    one = probabilities(noise, math.ceil(12 * noise))
    total = one
    for _ in range(clients - 1):
        total = np.convolve(total, one)
    padded = np.pad(total, (moved, moved))
    return np.maximum(0, padded - math.exp(at) * np.roll(padded, moved)).sum()


def words(count):
    return fold(root(7), torch.arange(count))


@pytest.mark.parametrize(
    ("noise", "clients", "norm"), [(0.5, 1, 1), (0.5, 4, 1), (0.8, 6, 2), (1.0, 3, 1), (4.0, 10, 7)]
)
def test_the_bound_is_never_below_the_exact_cost_of_a_sum(noise, clients, norm):
    found = epsilon(noise, clients, norm, 1, 1, 1e-5)
    assert exact_delta(noise, clients, norm, found) <= 1e-5
    if noise >= 1:  # below, the bound for sums of narrow noise is loose
        assert exact_delta(noise, clients, norm, 0.8 * found) > 1e-5


def test_a_sum_of_wide_noise_costs_what_one_gaussian_costs():
    found = epsilon(10.0, 16, 50.0, 100_000, 30, 1e-6)
    assert found == pytest.approx(rdp([Release(4 * 10 / 50, count=30)], 1e-6), rel=1e-9)


def test_many_shares_of_little_noise_in_many_dimensions_cost_more():
    wide, narrow = (epsilon(noise, 100, 10 * noise, 10_000, 1, 1e-5) for noise in (5.0, 0.7))
    assert narrow > 1.01 * wide


def test_less_noise_fewer_clients_longer_vectors_and_more_rounds_cost_more():
    def cost(noise=3.0, clients=20, norm=9.0, rounds=10):
        return epsilon(noise, clients, norm, 1000, rounds, 1e-5)

    def rises(costs):
        return bool((np.diff(costs) > 0).all())

    assert rises([cost(noise=noise) for noise in (8, 4, 2, 1, 0.5)])
    assert rises([cost(clients=clients) for clients in (80, 40, 20, 2, 1)])
    assert rises([cost(norm=norm) for norm in (1, 3, 9, 27)])
    assert rises([cost(rounds=rounds) for rounds in (1, 10, 100)])
    assert cost(rounds=0) == 0 and cost(noise=0.0) == math.inf


@pytest.mark.parametrize(
    ("key", "wrong"),
    [("noise", -1.0), ("clients", 0), ("norm", math.nan), ("dimension", 0), ("rounds", -1)],
)
def test_impossible_sums_are_refused(key, wrong):
    good: dict[str, Any] = {"noise": 1.0, "clients": 2, "norm": 1.0}
    good |= {"dimension": 1, "rounds": 1, "delta": 1e-5}
    with pytest.raises(ValueError, match=f"^{key} is"):
        epsilon(**good | {key: wrong})
    with pytest.raises(ValueError, match="delta"):
        epsilon(**good | {"delta": 0.0})


@pytest.mark.parametrize("noise", [0.3, 1.0, 2.5, 40.0])
def test_samples_have_the_probabilities_of_the_discrete_gaussian(noise):
    count = 200_000
    drawn = sample(words(count), noise).numpy()
    reach = math.ceil(12 * noise)
    expected = count * probabilities(noise, reach)
    found = np.bincount(drawn + reach, minlength=2 * reach + 1)
    often = expected >= 10
    expected, found = (np.append(of[often], of[~often].sum()) for of in (expected, found))
    expected, found = expected[expected > 0.5], found[expected > 0.5]
    chi_square = ((found - expected) ** 2 / expected).sum()
    # Wilson and Hilferty: (χ²/k)^(1/3) is about normal; 4 standard deviations are 3e-5.
    freedom = len(expected) - 1
    spread = 2 / (9 * freedom)
    assert ((chi_square / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread) < 4


@pytest.mark.parametrize("noise", [0.2, 3.0, 1000.0])
def test_probabilities_are_exact_far_into_the_tail(noise):
    # Evenly spaced words are the inverse of the distribution at known places.
    for size in (1, math.ceil(noise), math.ceil(5 * noise)):
        sizes = np.arange(size, math.ceil(40 * noise) + 2)
        whole = np.exp(-((np.arange(1, math.ceil(40 * noise) + 2) / noise) ** 2) / 2)
        tail = math.fsum(np.exp(-((sizes / noise) ** 2) / 2)) / (math.fsum(whole) + 0.5)
        place = round(tail * 2**63)
        slack = 2 + int(place * 1e-11)
        below, above = max(0, place - slack), place + slack
        both = np.array([below << 1, above << 1], dtype=np.uint64).view(np.int64)
        first, second = sample(torch.from_numpy(both), noise).tolist()
        assert second < size and (first >= size or place <= slack)


def test_the_lowest_bit_is_the_sign_and_every_word_gives_a_number():
    assert sample(torch.tensor([0, 1, -1, -2]), 3.0).tolist() == [30, -30, 0, 0]
    assert sample(words(12).reshape(3, 4), 3.0).shape == (3, 4)
