"""What a dishonest server tries with secure sums, by the real messages, and what no site does."""

from typing import Any

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from fedlens.fleet.keys import as_text
from fedlens.fleet.secure.protocol import Keys, Opened, about_keys, signed_by, unmasked
from fedlens.fleet.secure.site import Told
from fedlens.fleet.terms import Terms
from fedlens.runs.folder import from_bytes

pytest.importorskip("flwr", reason="a fleet needs flwr: pip install 'fedlens[fleet]'")

from tests.fleet.dishonest import DishonestSums, changed, model_to_train

ALL = [0, 1, 2, 3]


def own_key() -> str:
    """A key that is the server's, in the place of a site's."""
    return as_text(ec.generate_private_key(ec.SECP384R1()).public_key())


@pytest.fixture
def server(tmp_path) -> DishonestSums:
    return DishonestSums(tmp_path, rounds=3)


def says(server: DishonestSums, word: str, whom=ALL) -> bool:
    assert server.refused.keys() == set(whom), server.refused
    return all(word in why for why in server.refused.values())


def test_an_honest_round_is_answered_so_that_refusals_are_due_to_the_lies(server):
    masked = server.masked()
    opened = server.open(server.agree([*masked]))
    assert [*opened] == ALL
    assert all(set(one["seeds"]) == {"0", "1", "2", "3"} for one in opened.values())
    assert not any(one["keys"] for one in opened.values())


def test_no_update_leaves_without_masks(server):
    plain = {site: {"size": server.sizes[site], "keys": [1], "counted": None} for site in ALL}
    server.ask("train", plain, server.model)
    assert says(server, "begun no sum")
    server.begin()
    server.ask("train", plain, server.model)
    assert says(server, "out of turn")


def test_what_is_sent_looks_random_and_differs_from_attempt_to_attempt(server):
    one, two = server.masked(), server.masked()
    for site in ALL:
        a, b = (tried[site].tensors["masked"].numpy() for tried in (one, two))
        same = np.mean(a == b)
        assert same < 0.02, "1/256 of random bytes"
        assert abs(a.mean() - 127.5) < 5


def test_no_site_gives_both_secrets_of_another(server):
    masked = server.masked()
    assert [*masked] == ALL
    three = server.open(server.agree([0, 1, 2]))
    assert all(set(one["keys"]) == {"3"} and "3" not in one["seeds"] for one in three.values())
    server.open(server.agree(ALL, whom=[0, 1, 2]), whom=[0, 1, 2])
    assert says(server, "out of turn", [0, 1, 2])


def test_no_two_sums_of_a_round_whose_difference_is_one_update(server):
    server.masked()
    assert len(server.open(server.agree(ALL))) == 4
    for attempt in ("again", "once more"):
        assert [*server.masked(attempt=attempt)] == ALL
        assert not server.agree([0, 1, 2])
        assert says(server, "the difference would show", [0, 1, 2])
    server.masked()
    assert len(server.open(server.agree(ALL))) == 4, "the same sum may come again"
    server.model = model_to_train(1)
    server.masked()
    assert not server.agree([1, 2, 3])
    assert says(server, "the difference would show", [1, 2, 3])


def sum_of(server: DishonestSums, round: int, survivors: list[int]) -> Any:
    """What a server reads of an attempt of a round, if the sites open it for these survivors."""
    told = server.told(round=round)
    about = Told(**{**told, "sites": tuple(told["sites"])}).round_of(2 / 3, 32)
    keys = server.begin(**told)
    sealed = server.share(keys)
    masked = server.train(sealed, round=round)
    opened = server.open(server.agree(survivors))
    words = [masked[site].tensors["masked"].numpy().view(np.uint32) for site in survivors]
    shares = {
        site: Opened(
            *({int(k): bytes.fromhex(v) for k, v in one[n].items()} for n in ("seeds", "keys"))
        )
        for site, one in opened.items()
    }
    public = {site: Keys(*map(bytes.fromhex, one)) for site, one in keys.items()}
    total = np.asarray(np.sum(words, axis=0, dtype=np.uint32))
    return unmasked(total, about, public, sealed, survivors, shares)


def test_what_two_rounds_on_one_model_show_is_known_and_has_a_remedy(server, tmp_path):
    """A server that says that a site was lost has its update, by the round before: docs/secure.md.
    Where all must stay, every sum has all sites."""
    apart = sum_of(server, 0, ALL) - sum_of(server, 1, [0, 1, 2])
    (kept, *_) = (server.sites[3].home / "memory" / server.terms.hash).glob("sent-*")
    own = from_bytes(kept.read_bytes(), torch.device("cpu"))
    update = np.concatenate([own[name].numpy().ravel() for name in sorted(own)])
    assert np.array_equal(apart, update)

    (tmp_path / "strict").mkdir()
    strict = DishonestSums(tmp_path / "strict", rounds=3, threshold=1.0)
    strict.masked()
    assert not strict.agree([0, 1, 2])
    assert all("4 are the fewest" in why for why in strict.refused.values())


def test_nothing_is_opened_twice(server):
    server.masked()
    signatures = server.agree(ALL)
    assert len(server.open(signatures)) == 4
    assert not server.open(signatures)
    assert says(server, "out of turn")
    assert not server.agree(ALL)


def test_an_attempt_that_was_given_up_cannot_be_opened_any_more(server):
    server.masked()
    signatures = server.agree(ALL)
    server.begin()
    assert not server.open(signatures)
    assert says(server, "out of turn")


@pytest.mark.parametrize(
    "sites", [[0], [0, 1], [0, 1, 2], [0, 1, 2, 2], [0, 1, 2, 7], [3, 2, 1, 0], [-1, 0, 1, 2]]
)
def test_another_cohort_than_was_approved_is_refused(sites, server):
    assert not server.begin(sites=sites)
    assert server.refused.keys() == set(ALL)


@pytest.mark.parametrize("left", [1, 2])
def test_a_cohort_below_the_fewest_is_refused_at_every_stage(left, server):
    few = [*range(left)]
    keys = server.begin()
    assert not server.share({site: keys[site] for site in few})
    assert says(server, "are the fewest", few)
    sealed = server.share(keys)
    assert not server.train({site: sealed[site] for site in few})
    assert says(server, "are the fewest", few)
    server.masked()
    assert not server.agree(few)
    assert says(server, "are the fewest", few)


def test_a_changed_cohort_is_refused(server):
    keys = server.begin()
    sealed = server.share({site: keys[site] for site in (0, 1, 2)})
    sealed[3] = dict.fromkeys(ALL, sealed[0][1])
    assert not {0, 1, 2} & server.train(sealed).keys()
    keys = server.begin()
    orders = {site: {"keys": keys | {7: keys[0]}} for site in ALL}
    assert not server.ask("shares", orders)
    assert says(server, "cohort changed")
    masked = server.train(server.share(server.begin()))
    assert not server.agree([0, 1, 2], whom=[3])
    assert says(server, "left out", [3])
    assert not server.agree([*masked, 7], whom=ALL)
    assert says(server, "cohort changed")


def test_keys_that_are_not_signed_by_their_site_are_refused(server):
    """As of a server that puts itself between two sites."""
    told = server.told()
    round = Told(**{**told, "sites": tuple(told["sites"])}).round_of(2 / 3, 32)
    own = [X25519PrivateKey.generate().public_key().public_bytes_raw() for _ in range(2)]
    stranger = signed_by(ec.generate_private_key(ec.SECP384R1()))
    for forged in (b"", stranger(about_keys(round, 3, *own))):
        keys = server.begin(attempt=told["attempt"])
        keys[3] = [part.hex() for part in (*own, forged)]
        assert not {0, 1, 2} & server.share(keys).keys()
        assert all("not signed" in server.refused[site] for site in (0, 1, 2))
    keys = server.begin()
    assert not {0, 1} & server.share(keys | {3: keys[2]}).keys(), "nor another site's own"


def test_what_belongs_to_another_attempt_or_round_is_refused(server):
    keys = server.begin(attempt="one")
    sealed = server.share(keys)
    later = server.begin(attempt="two")
    assert not {0, 1, 2} & server.share(later | {3: keys[3]}).keys()
    assert all("not signed" in server.refused[site] for site in (0, 1, 2))
    server.share(server.begin(attempt="three"))
    assert not server.train(sealed)
    assert says(server, "were changed")
    server.masked(attempt="four")
    signatures = server.agree(ALL)
    server.masked(attempt="five")
    server.agree(ALL)
    assert not server.open(signatures)
    assert says(server, "did not sign")


def test_sites_that_are_told_different_things_have_no_common_sum(server):
    for key, value in (("examples", 10**6), ("counted", 7), ("model", "0" * 64), ("attempt", "x")):
        told = server.told()
        orders = {site: {"sum": told | ({key: value} if site == 3 else {})} for site in ALL}
        keys = {site: one.facts["keys"] for site, one in server.ask("keys", orders).items()}
        assert len(keys) == 4
        assert not server.share(keys)
        assert says(server, "not signed"), key


def test_one_site_is_not_sent_another_model_than_the_others(server):
    """So that no model that silences all others can show the update of one."""
    sealed = server.share(server.begin())
    assert not server.train(sealed, model_to_train(1))
    assert says(server, "another model")
    keys = server.begin(round=1)
    assert len(server.share(keys)) == 4
    assert not server.train(sealed, round=2)
    assert says(server, "another round")


def test_too_few_signatures_open_nothing(server):
    server.masked()
    signatures = server.agree(ALL)
    two = {site: signatures[site] for site in (0, 1)}
    assert not server.open(two, whom=ALL)
    assert says(server, "2 sites have signed, and 3 are needed")
    assert not server.open({}, whom=ALL)
    assert not server.open(two | {2: signatures[3]}, whom=ALL)
    assert says(server, "did not sign")


def test_a_number_of_examples_that_gives_a_site_too_much_weight_is_refused(server):
    assert not server.masked(examples=min(server.sizes.values()) - 1)
    assert says(server, "all sites together")


MALFORMED = [None, 7, "x", [], {}, {"sites": 3}, {"0": "zz"}, {"x": "00"}, [["a"]]]


@pytest.mark.parametrize("what", ["keys", "shares", "train", "agree", "open"])
def test_malformed_orders_are_refusals_and_no_mistakes(what, server):
    name = {"keys": "sum", "shares": "keys", "train": "sealed", "agree": "survivors"}
    for value in MALFORMED:
        if what == "train":
            server.share(server.begin())
        elif what != "keys":
            server.begin()
        order: dict[str, Any] = {name.get(what, "signatures"): value, "round": 0}
        order |= {"size": server.sizes[0], "keys": [1], "counted": None} if what == "train" else {}
        assert not server.ask(what, {0: order}, server.model if what == "train" else None)
        assert "its own files" not in server.refused[0], value


def test_the_person_who_approves_sees_the_keys_and_other_keys_are_another_experiment(server):
    text = "\n".join(server.terms.describe() + server.terms.effects())
    assert text.count("SHA256:") == 4
    assert "3 sites or more" in text
    key = server.terms.content.sites[0].key
    with pytest.raises(ValueError, match="keys"):
        Terms(changed(server.terms, lambda content: content.update(sites=[])))
    with pytest.raises(ValueError, match="same key"):
        Terms(changed(server.terms, lambda content: content["sites"][1].update(key=key)))
    own = own_key()
    other = Terms(changed(server.terms, lambda content: content["sites"][1].update(key=own)))
    assert other.hash != server.terms.hash
    order = {"terms": other.text, "experiment": other.hash}
    server.ask("sizes", {0: order})
    assert "not approved" in server.refused[0]


def test_a_site_whose_place_has_another_key_takes_no_part(tmp_path, server):
    ann, bob = server.sites[:2]
    (ann.home / "node.key").write_bytes((bob.home / "node.key").read_bytes())
    assert 0 not in server.begin()
    assert "another's" in server.refused[0]


def test_secrets_are_gone_once_a_sum_is_opened(server):
    server.masked()
    folder = server.sites[0].home / "memory" / server.terms.hash / "sums"
    assert '"secret": "' in (folder / "member.json").read_text()
    server.open(server.agree(ALL))
    left = (folder / "member.json").read_text()
    assert '"secret": ""' in left
    assert '"shares": {}' in left
