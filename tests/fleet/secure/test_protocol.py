"""The protocol of secure sums: its sums, its losses, and a server that lies."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedlens.algorithm.secure import SecureSum
from fedlens.fleet.secure import shamir
from fedlens.fleet.secure.protocol import Keys, Member, Round, Unsafe, unmasked
from tests.fleet.secure.rounds import Sum, asked, sign, verify

STAGES = ("begin", "share", "mask", "agree", "open")
FOUR = {site: [site, -site, 7] for site in range(4)}
FIVE = {site: [2**site, -1] for site in range(5)}


def summed(one: Sum) -> list[int]:
    return [int(n) for n in np.sum([one.numbers[site] for site in one.masked], axis=0)]


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_the_sum_is_that_of_the_survivors_to_the_bit(data):
    """Whatever is lost at whatever stage, if enough stay."""
    count, bits = data.draw(st.integers(3, 8)), data.draw(st.sampled_from([16, 24, 32, 40, 52]))
    most = (2 ** (bits - 1) - 1) // count
    drawn = st.lists(st.integers(-most, most), min_size=4, max_size=4)
    numbers = {site: data.draw(drawn) for site in range(count)}
    left, lost = set(range(count)), {}
    for stage in STAGES:
        needed = asked(count).threshold if stage in ("agree", "open") else asked(count).fewest
        gone = data.draw(st.sets(st.sampled_from(sorted(left)), max_size=len(left) - needed))
        lost[stage], left = gone, left - gone
    one = Sum(numbers, lost, bits)
    assert one.run().tolist() == summed(one)
    assert set(one.masked) == set(range(count)) - lost["begin"] - lost["share"] - lost["mask"]


def test_the_sum_is_the_simulations():
    rng = torch.Generator().manual_seed(0)
    updates = torch.randn(5, 1000, generator=rng, dtype=torch.float64)
    shares = torch.rand(5, generator=rng, dtype=torch.float64)
    shares /= shares.sum()
    secure = SecureSum(16.0, 32, 5, 2 / 3, 1.0)
    numbers = {
        site: secure.whole({"w": updates[[site]]}, shares[[site]])["w"].numpy() for site in range(5)
    }
    expected = secure.whole({"w": updates}, shares)["w"]
    assert Sum(numbers).run().tolist() == expected.tolist()


@pytest.mark.parametrize("stage", STAGES)
def test_with_too_few_sites_nothing_is_opened(stage):
    """Five sites need four. The sites that are left refuse, or there is nothing to add up."""
    one = Sum(FIVE, {stage: {1, 3}})
    with pytest.raises((Unsafe, ValueError), match=r"fewest|needed"):
        one.run()
    if stage != "open":
        assert not one.opened


def test_below_the_threshold_a_round_is_repeated_with_those_that_are_left():
    failed = Sum(FIVE, {"mask": {1, 3}})
    with pytest.raises(Unsafe):
        failed.run()
    again = Sum({place: FIVE[site] for place, site in enumerate((0, 2, 4))})
    assert again.run().tolist() == [1 + 4 + 16, -3]


def test_what_is_sent_is_masked():
    """Also where sites send the same, twice the same, or nothing but zeros."""
    one, other = (Sum({site: [0] * 4000 for site in range(3)}) for _ in range(2))
    for each in (one, other):
        each.begin().share().mask()
    sent = [masked for each in (one, other) for masked in each.masked.values()]
    for number, masked in enumerate(sent):
        ones = np.unpackbits(masked.view(np.uint8)).mean()
        assert abs(ones - 0.5) < 10 * 0.5 / np.sqrt(4000 * 32)
        assert all((masked == another).mean() < 0.01 for another in sent[:number])


# What a dishonest server may try.


def test_a_site_never_gives_both_secrets_of_another_one():
    """The server says to two halves that different sites are lost: neither has enough signers."""
    one = Sum(FIVE).begin().share().mask()
    all_there, without = (0, 1, 2, 3, 4), (0, 1, 2, 3)
    signatures: dict[tuple[int, ...], dict[int, bytes]] = {all_there: {}, without: {}}
    for site in (0, 1, 2, 3):
        told = all_there if site < 2 else without
        one.members[site], signatures[told][site] = one.members[site].agree(told, sign(site))
    for site in (0, 1, 2, 3):
        for some in (*signatures.values(), signatures[all_there] | signatures[without]):
            with pytest.raises(Unsafe):
                one.members[site].open(some, verify)


def test_what_is_opened_has_one_secret_of_each_site():
    one = Sum(FIVE, {"mask": {4}})
    one.run()
    for opened in one.opened.values():
        assert opened.seeds.keys() == {0, 1, 2, 3}
        assert opened.keys.keys() == {4}


def test_a_site_signs_for_one_sum_only():
    one = Sum(FIVE).begin().share().mask().agree()
    with pytest.raises(Unsafe, match="twice"):
        one.members[0].agree((0, 1, 2, 3), sign(0))


def test_a_site_never_opens_twice():
    one = Sum(FOUR)
    one.run()
    with pytest.raises(Unsafe, match="twice"):
        one.members[0].open(one.signatures, verify)
    assert not one.members[0].shares
    assert not one.members[0].secret


@pytest.mark.parametrize("stage", ["share", "mask"])
def test_no_stage_is_done_twice(stage):
    one = Sum(FOUR).begin().share().mask()
    with pytest.raises(Unsafe, match="twice"):
        if stage == "share":
            one.members[0].share(one.keys, verify)
        else:
            one.members[0].mask(np.zeros(3, np.int64), one.sealed_for(0))


def test_a_stage_cannot_be_left_out():
    one = Sum(FOUR).begin().share()
    for site in range(4):
        with pytest.raises(Unsafe, match="turn"):
            one.members[site].agree(range(4), sign(site))


@pytest.mark.parametrize(
    "round",
    [
        Round("it", (0, 1), 2, 32),
        Round("it", (0, 0, 0), 2, 32),
        Round("it", (0, 1, 1), 2, 32),
        Round("it", (0, 1, 2, 3), 2, 32),
        Round("it", (0,), 1, 32),
    ],
)
def test_a_cohort_below_the_fewest_is_refused(round):
    with pytest.raises(Unsafe, match=r"fewest|two thirds"):
        Member.begin(round, 0, sign(0))


def test_too_few_keys_shares_or_survivors_are_refused():
    one = Sum(FOUR).begin()
    two = {site: one.keys[site] for site in (0, 1)}
    with pytest.raises(Unsafe, match="fewest"):
        one.members[0].share(two, verify)
    one.share()
    with pytest.raises(Unsafe, match="fewest"):
        one.members[0].mask(np.zeros(3, np.int64), {1: one.sealed[1][0]})
    one.mask()
    with pytest.raises(Unsafe, match="fewest"):
        one.members[0].agree((0, 1), sign(0))


def test_a_changed_cohort_is_refused():
    one = Sum(FIVE, {"begin": {4}}).begin()
    stranger = one.keys[3]
    with pytest.raises(Unsafe, match="cohort"):
        one.members[0].share({**one.keys, 9: stranger}, verify)
    one.share()
    with pytest.raises(Unsafe, match="cohort"):
        one.members[0].mask(np.zeros(2, np.int64), {**one.sealed_for(0), 4: bytes(148)})
    one.mask()
    for wrong in ((0, 1, 2, 4), (0, 1, 2, 3, 3), (1, 2, 3)):
        with pytest.raises(Unsafe, match=r"cohort|left out"):
            one.members[0].agree(wrong, sign(0))


def test_a_replayed_round_is_refused():
    """Keys, shares and signatures of another round fit no other."""
    before = Sum(FOUR)
    before.run()
    again = Sum(FOUR)
    again.round = replace(again.round, about="round 2")
    again.begin()
    with pytest.raises(Unsafe, match="signed"):
        again.members[0].share({**again.keys, 1: before.keys[1]}, verify)
    again.share()
    with pytest.raises(Unsafe, match="changed"):
        sealed = {**again.sealed_for(0), 1: before.sealed[1][0]}
        again.members[0].mask(np.zeros(3, np.int64), sealed)
    again.mask().agree()
    with pytest.raises(Unsafe, match="sign"):
        again.members[0].open({**again.signatures, 1: before.signatures[1]}, verify)


def test_sites_that_were_told_different_things_have_no_common_sum():
    """Another model, another attempt, or another cohort: `about` and the sites are signed."""
    one = Sum(FOUR)
    one.begin()
    told = replace(one.round, about="another model")
    one.members[1], one.keys[1] = Member.begin(told, 1, sign(1))
    with pytest.raises(Unsafe, match="signed"):
        one.members[0].share(one.keys, verify)
    with pytest.raises(Unsafe, match="signed"):
        one.members[1].share(one.keys, verify)


@pytest.mark.parametrize("by", [-1, 2])
def test_keys_that_their_site_has_not_signed_are_refused(by):
    """Whether the server made them itself, or another site signed them."""
    one = Sum(FOUR).begin()
    _, false = Member.begin(one.round, 1, sign(by))
    with pytest.raises(Unsafe, match="signed"):
        one.members[0].share({**one.keys, 1: false}, verify)
    mixed = Keys(false.sealing, one.keys[1].masking, one.keys[1].signature)
    with pytest.raises(Unsafe, match="signed"):
        one.members[0].share({**one.keys, 1: mixed}, verify)


def test_a_sites_own_keys_cannot_be_replaced():
    one = Sum(FOUR).begin()
    _, other = Member.begin(one.round, 0, sign(0))
    with pytest.raises(Unsafe, match="own"):
        one.members[0].share({**one.keys, 0: other}, verify)


def test_shares_that_were_changed_or_are_for_another_are_refused():
    one = Sum(FOUR).begin().share()
    sealed = one.sealed_for(0)
    broken = bytes([sealed[1][0] ^ 1]) + sealed[1][1:]
    for wrong in (broken, one.sealed[1][2], sealed[2], b""):
        with pytest.raises(Unsafe, match="changed"):
            one.members[0].mask(np.zeros(3, np.int64), {**sealed, 1: wrong})


def test_a_signature_that_is_none_is_refused():
    one = Sum(FOUR).begin().share().mask().agree()
    with pytest.raises(Unsafe, match="sign"):
        one.members[0].open({**one.signatures, 1: one.signatures[2]}, verify)
    with pytest.raises(Unsafe, match="needed"):
        one.members[0].open({0: one.signatures[0]}, verify)


def test_a_site_that_lies_about_a_share_is_found():
    one = Sum(FIVE, {"mask": {4}})
    one.run()
    lie = bytes(shamir.SHARE)
    total = sum(one.masked.values())
    for wrong in (
        one.opened[1]._replace(seeds={**one.opened[1].seeds, 0: lie}),
        one.opened[1]._replace(keys={4: lie}),
    ):
        opened = {**one.opened, 1: wrong}
        with pytest.raises(ValueError, match="belong"):
            unmasked(total, one.round, one.keys, one.sealed, one.masked, opened)
