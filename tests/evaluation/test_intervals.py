import pytest

from fedlens.evaluation.intervals import wilson


def test_wilsons_interval_is_that_of_the_books():
    # Newcombe (1998), table I: 81 of 263 and 15 of 148.
    assert wilson(81 / 263, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert wilson(15 / 148, 148) == pytest.approx((0.0624, 0.1605), abs=5e-5)


def test_it_stays_between_0_and_1_and_tells_nothing_of_no_examples():
    assert wilson(0.0, 0) == wilson(2.0, 20) == wilson(-1.0, 20) == (0.0, 1.0)
    assert wilson(0.0, 20) == pytest.approx((0.0, 0.1611), abs=5e-5)
    assert wilson(1.0, 20) == pytest.approx((0.8389, 1.0), abs=5e-5)
