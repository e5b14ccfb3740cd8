"""Strategies over rounds: against jax-privacy 2.0.0, brute force and what they are built for."""

import itertools
import math

import numpy as np
import pytest

from fedlens.privacy import factorisation
from fedlens.privacy.accountant import epsilon
from fedlens.privacy.events import Release
from fedlens.privacy.factorisation import Tree, banded, error, strategy_of
from fedlens.privacy.mechanisms import BandedNoise
from tests.privacy.trees import nodes_of, weights_of

BY_JAX_PRIVACY = {  # rounds, bands: mean error of `banded.optimize` after 500 steps
    (20, 4): 4.209835426494067,
    (100, 10): 8.413685697743544,
    (300, 48): 8.622746182715984,
}


def patterns(rounds, participations, separation):
    """All sets of rounds, so far apart and so many at most."""
    for count in range(1, participations + 1):
        for chosen in itertools.combinations(range(rounds), count):
            if all(b - a >= separation for a, b in itertools.pairwise(chosen)):
                yield list(chosen)


def longest(strategy, participations, separation):
    cases = patterns(strategy.shape[1], participations, separation)
    return max(np.linalg.norm(strategy[:, chosen].sum(axis=1)) for chosen in cases)


def of_tree(tree):
    """The strategy of a tree: a row for each node that some sum needs, 1 at its rounds."""
    nodes = set().union(*(nodes_of(tree, t + 1) for t in range(tree.rounds)))
    strategy = np.zeros((len(nodes), tree.rounds))
    for row, (index, level, place) in enumerate(sorted(nodes)):
        first = index * tree.restart + place * 2**level
        strategy[row, first : first + 2**level] = 1
    return strategy


@pytest.fixture(scope="module")
def solved():
    return {size: banded(*size) for size in BY_JAX_PRIVACY}


@pytest.fixture
def hundred(solved):
    return solved[100, 10]


@pytest.mark.parametrize(("rounds", "bands"), BY_JAX_PRIVACY)
def test_the_banded_strategy_has_unit_columns_and_the_error_of_jax_privacy(solved, rounds, bands):
    found = solved[rounds, bands].matrix
    assert np.abs(np.linalg.norm(found, axis=0) - 1).max() < 1e-9
    assert (np.triu(found, 1) == 0).all() and (np.tril(found, -bands) == 0).all()
    assert error(found) == pytest.approx(BY_JAX_PRIVACY[rounds, bands], rel=1e-3)


def test_the_strategy_of_a_gram_matrix_has_it_and_cholesky_alone_has_long_columns(solved):
    strategy = solved[300, 48].matrix
    gram = strategy.T @ strategy
    right = strategy_of(gram)
    assert np.abs(right.T @ right - gram).max() < 1e-9
    assert np.abs(np.linalg.norm(right, axis=0) - 1).max() < 1e-9
    # What pfl 0.6 takes: its rows have norm 1, and a client of the first round is 3.8 times as
    # visible as stated.
    wrong = np.linalg.norm(np.linalg.cholesky(gram), axis=0)
    assert wrong.argmax() == 0 and wrong.max() == pytest.approx(3.81, abs=0.03)


def test_one_band_is_independent_noise():
    assert (banded(7, 1).matrix == np.eye(7)).all()


def test_more_bands_have_less_error_down_to_that_of_a_known_optimum():
    errors = [error(banded(40, bands).matrix) for bands in (1, 2, 5, 10, 20, 40)]
    assert (np.diff(errors) < 0).all() and errors[0] == pytest.approx(41 / 2)


def test_two_rounds_have_the_error_of_pencil_and_paper():
    # X = [[1, x], [x, 1]], A'A = [[2, 1], [1, 1]]: tr(A'A X⁻¹) = (3 - 2x) / (1 - x²), least where
    # x² - 3x + 1 = 0.
    x = (3 - math.sqrt(5)) / 2
    assert error(banded(2, 2).matrix) == pytest.approx((3 - 2 * x) / (1 - x**2) / 2, rel=1e-5)


def test_more_rounds_than_are_solved_for_stretch_the_solution(monkeypatch):
    whole = banded(200, 8)
    monkeypatch.setattr(factorisation, "LARGEST", 100)
    stretched = banded(200, 8)
    assert np.abs(np.linalg.norm(stretched.matrix, axis=0) - 1).max() < 1e-9
    assert error(whole.matrix) < error(stretched.matrix) < 1.05 * error(whole.matrix)


def test_noise_round_by_round_is_the_inverse_of_the_strategy(hundred):
    independent = np.random.default_rng(0).normal(size=(100, 3))
    past: list[np.ndarray] = []
    for round, fresh in enumerate(independent):
        past.append(hundred.noise(round, fresh, past[-9:]))
    expected = np.linalg.solve(hundred.matrix, independent)
    assert np.abs(np.array(past) - expected).max() < 1e-9


def test_clients_that_return_after_all_bands_add_up_as_strangers():
    strategy = banded(12, 4)
    known = math.sqrt(BandedNoise(4).squared(12, 3, 4))
    assert longest(strategy.matrix, 3, 4) == pytest.approx(known, abs=1e-9)
    assert longest(strategy.matrix, 2, 3) > math.sqrt(2) + 0.01


def test_returning_before_all_bands_have_passed_is_refused():
    with pytest.raises(ValueError, match="come back after 9 rounds"):
        BandedNoise(10).check(100, 9)


@pytest.mark.parametrize("bands", [0, -1, 21, 10**9])
def test_impossible_bands_are_refused(bands):
    with pytest.raises(ValueError, match="bands"):
        banded(20, bands)


@pytest.mark.parametrize(("rounds", "restart"), [(8, 8), (12, 12), (12, 4), (11, 5), (9, 1)])
def test_a_sum_over_a_tree_covers_its_rounds_once(rounds, restart):
    tree = Tree(rounds, restart)
    for done in range(rounds + 1):
        counts = np.zeros(rounds)
        for index, level, place in nodes_of(tree, done):
            first = index * restart + place * 2**level
            counts[first : first + 2**level] += 1
        assert counts.tolist() == [1] * done + [0] * (rounds - done)


def test_the_noise_of_a_round_is_what_the_sum_gains():
    tree = Tree(12, 5)
    total: dict[tuple[int, int, int], int] = {}
    for round in range(12):
        for node, weight in weights_of(tree, round).items():
            total[node] = total.get(node, 0) + weight
        assert {node for node, weight in total.items() if weight} == nodes_of(tree, round + 1)
        assert set(total.values()) <= {0, 1}


@pytest.mark.parametrize(("rounds", "restart"), [(8, 8), (12, 12), (12, 4), (11, 5), (9, 1)])
@pytest.mark.parametrize(("participations", "separation"), [(1, 1), (2, 1), (3, 2), (3, 4)])
def test_no_client_is_more_visible_in_a_tree_than_its_sensitivity(
    rounds, restart, participations, separation
):
    tree = Tree(rounds, restart)
    brute = longest(of_tree(tree), participations, separation)
    found = tree.sensitivity(participations, separation)
    assert brute <= found + 1e-12 <= 1.25 * brute + 1e-9
    if participations == 1:
        assert found == pytest.approx(brute)


def test_restarts_cost_each_client_its_share_and_the_sum_more_noise():
    once = Tree(64, 64)
    assert once.sensitivity(1, 64) == math.sqrt(7) and len(nodes_of(once, 63)) == 6
    fourth = Tree(64, 16)
    assert fourth.sensitivity(4, 16) == math.sqrt(4 * 5) and len(nodes_of(fourth, 63)) == 7
    assert fourth.sensitivity(4, 16) < once.sensitivity(4, 16)


@pytest.mark.parametrize("restart", [0, 13])
def test_impossible_restarts_are_refused(restart):
    with pytest.raises(ValueError, match="restart"):
        Tree(12, restart)


def test_a_strategy_of_one_band_costs_what_its_rounds_cost_one_by_one():
    at_once = epsilon([Release(4.0 / math.sqrt(BandedNoise(1).squared(10, 10, 1)))], 1e-5)
    assert at_once == pytest.approx(epsilon([Release(4.0, count=10)], 1e-5), rel=1e-3)
