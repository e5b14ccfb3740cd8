"""Lower bounds of ε from guesses: closed forms, and a randomised response that is never refuted."""

import math

import numpy as np
import pytest

from fedlens.privacy.one_run import best_bound, lower_bound, p_value


@pytest.mark.parametrize("guesses", [5, 50, 1000])
def test_if_all_guesses_are_right_the_bound_has_a_closed_form(guesses):
    """P[W >= r] = chance^r."""
    chance = 0.05 ** (1 / guesses)
    expected = math.log(chance / (1 - chance))
    assert lower_bound(guesses, guesses, guesses) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("counts", "delta", "expected", "chance"),
    [
        ((1000, 100, 90), 1e-5, 1.6261436787, 8.412885614e-4),
        ((1000, 500, 300), 1e-5, 0.2512053254, 1.0),
        ((500, 500, 490), 1e-5, 3.3543280633, 6.792235651e-5),
        ((200, 50, 50), 1e-3, 2.0972112473, 2.116861142e-2),
        ((10000, 300, 200), 1e-6, 0.4850374660, 0.9943453848),
    ],
)
def test_the_bound_is_that_of_jax_privacy(counts, delta, expected, chance):
    """Its `auditing`, version 2.0.0: the bound at 95%, and the chance under ε = 1."""
    canaries, guesses, right = counts
    bound = lower_bound(canaries, guesses, right, delta)
    assert bound == pytest.approx(expected, abs=2e-6)
    assert p_value(1.0, delta, canaries, guesses, right) == pytest.approx(chance, rel=1e-8)


def test_guesses_by_chance_refute_nothing():
    assert lower_bound(1000, 500, 250) == 0.0
    assert lower_bound(10, 0, 0) == 0.0


def test_the_chance_of_a_tail_is_that_of_a_binomial_distribution():
    ways = [math.comb(9, w) for w in range(10)]
    assert p_value(0.0, 0.0, 20, 9, 7) == pytest.approx(sum(ways[7:]) / 2**9)
    chance = math.exp(1.0) / (1 + math.exp(1.0))
    tail = sum(math.comb(9, w) * chance**w * (1 - chance) ** (9 - w) for w in (7, 8, 9))
    assert p_value(1.0, 0.0, 20, 9, 7) == pytest.approx(tail)


def test_delta_weakens_the_bound_by_the_steepest_part_below():
    """2 m δ max_i P[v - i <= W < v] / i, worked out by a loop."""
    chance = math.exp(0.7) / (1 + math.exp(0.7))
    pmf = [math.comb(12, w) * chance**w * (1 - chance) ** (12 - w) for w in range(13)]
    steepest = max(sum(pmf[10 - i : 10]) / i for i in range(1, 11))
    expected = sum(pmf[10:]) + 2 * 30 * 1e-4 * steepest
    assert p_value(0.7, 1e-4, 30, 12, 10) == pytest.approx(expected)
    assert lower_bound(1000, 200, 180, 1e-3) < lower_bound(1000, 200, 180)


def test_a_mechanism_that_tells_the_truth_with_its_epsilon_is_hardly_ever_refuted():
    """Randomised response of ε = 1: the bound of 95% exceeds 1 in at most 5% of runs."""
    chance, above = 1 / (1 + math.exp(-1.0)), 0
    draw = np.random.default_rng(0)
    for _ in range(200):
        member = draw.random(400) < 0.5
        said = np.where(draw.random(400) < chance, member, ~member)
        scores = said + 1e-6 * draw.random(400)
        above += best_bound(scores, member)[0] > 1.0
    assert above <= 10
    member = draw.random(4000) < 0.5
    said = np.where(draw.random(4000) < chance, member, ~member)
    assert 0.7 < best_bound(said + 1e-6 * draw.random(4000), member)[0] < 1.0


def test_impossible_counts_are_refused():
    with pytest.raises(ValueError, match="not possible"):
        p_value(1.0, 0.0, 10, 11, 3)
