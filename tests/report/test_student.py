import math
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedlens.evaluation.intervals import holm, incomplete_beta, p_value
from fedlens.report.pairs import estimate, quantile
from tests.later import Later

special, stats = Later("scipy.special"), Later("scipy.stats")


@settings(deadline=None, max_examples=50)
@given(st.floats(0.1, 300), st.floats(0.1, 300), st.floats(0, 1))
def test_the_incomplete_beta_function_is_scipys(a, b, x):
    assert incomplete_beta(a, b, x) == pytest.approx(special.betainc(a, b, x), abs=1e-11)


@settings(deadline=None, max_examples=50)
@given(st.floats(0, 60), st.integers(1, 200))
def test_p_values_are_scipys(t, dof):
    assert p_value(t, dof) == pytest.approx(2 * stats.t.sf(t, dof), rel=1e-6, abs=1e-300)
    assert p_value(-t, dof) == p_value(t, dof)


def test_quantiles_are_those_of_the_tables():
    printed = {1: 12.706, 2: 4.303, 4: 2.776, 9: 2.262, 30: 2.042, 120: 1.980}
    for dof, value in printed.items():
        assert quantile(0.95, dof) == pytest.approx(value, abs=5e-4)
    assert quantile(0.99, 9) == pytest.approx(stats.t.ppf(0.995, 9), rel=1e-10)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.floats(-1, 1), min_size=2, max_size=12))
def test_an_estimate_is_the_paired_t_test_of_scipy(values):
    found = estimate(values)
    assert found.mean == pytest.approx(fmean(values))
    if found.std and found.std > 1e-6:
        expected = stats.ttest_1samp(values, 0)
        assert found.p == pytest.approx(expected.pvalue, rel=1e-6)
        interval = expected.confidence_interval(0.95)
        assert (found.low, found.high) == pytest.approx((interval.low, interval.high))


def test_one_value_has_no_spread_and_equal_values_no_p():
    assert estimate([0.5]).p is None and estimate([0.5]).low is None
    same = estimate([0.25, 0.25, 0.25])
    assert (same.mean, same.std, same.low, same.p) == (0.25, 0.0, 0.25, None)


def test_holm_corrects_for_how_many_were_asked():
    assert holm([0.01, None, 0.04, 0.03]) == pytest.approx([0.03, None, 0.06, 0.06])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert not any(map(math.isnan, filter(None, holm([0.2]))))
