"""Shares of a secret: enough of them give it, and fewer say nothing."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedlens.fleet.secure import shamir


@given(st.binary(min_size=32, max_size=32), st.integers(1, 6), st.integers(0, 4), st.randoms())
def test_any_shares_that_are_enough_give_the_secret(secret, threshold, more, random):
    shares = shamir.split(secret, threshold, range(1, threshold + more + 1))
    some = random.sample(sorted(shares), random.randint(threshold, threshold + more))
    assert shamir.join({x: shares[x] for x in some}, threshold) == secret
    assert all(len(share) == shamir.SHARE for share in shares.values())


def test_fewer_shares_fit_every_secret():
    """To two of three shares there is a third for any secret: they say nothing about it."""
    shares = shamir.split(bytes(32), 3, (1, 2))
    for secret in (bytes(32), b"\xff" * 32):
        line = {x: int.from_bytes(share) for x, share in shares.items()}
        value, p = int.from_bytes(secret), shamir.PRIME
        # The parabola through (0, secret) and both shares, at 3.
        third = (value - 3 * line[1] + 3 * line[2]) % p
        assert shamir.join({**shares, 3: third.to_bytes(shamir.SHARE)}, 3) == secret


def test_too_few_shares_are_refused():
    with pytest.raises(ValueError, match="needed"):
        shamir.join(shamir.split(bytes(32), 3, (1, 2)), 3)


def test_a_wrong_share_is_found_if_there_are_more_than_are_needed():
    shares = shamir.split(b"s" * 32, 3, range(1, 6))
    for x in shares:
        wrong = {**shares, x: bytes(shamir.SHARE)}
        with pytest.raises(ValueError, match="belong"):
            shamir.join(wrong, 3)


def test_shares_of_one_secret_differ_each_time():
    found = {shamir.split(b"s" * 32, 2, [1])[1] for _ in range(20)}
    assert len(found) == 20


def test_every_set_of_places_has_the_same_secret():
    shares = shamir.split(b"a secret of thirty-two bytes ...", 2, (2, 5, 9))
    for some in itertools.combinations(shares, 2):
        assert shamir.join({x: shares[x] for x in some}, 2) == b"a secret of thirty-two bytes ..."
