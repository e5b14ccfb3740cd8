"""Numbers of things, in words."""

import pytest

from fedlens.algorithm import Algorithm, compose
from fedlens.algorithm.pieces import Uniformly
from fedlens.algorithms import krum
from fedlens.storage.words import count_of


@pytest.mark.parametrize(
    ("count", "words"), [(0, "0 clients"), (1, "1 client"), (25_000, "25,000 clients")]
)
def test_one_is_one_and_all_other_numbers_are_many(count, words):
    assert count_of(count, "client") == words


@pytest.mark.parametrize(
    ("hostile", "words"), [(1, "1 hostile client among"), (2, "2 hostile clients")]
)
def test_a_defence_says_how_many_hostile_clients_are_too_many(hostile, words):
    with pytest.raises(ValueError, match=words):
        compose(Algorithm(select=Uniformly(3)), krum(hostile))
