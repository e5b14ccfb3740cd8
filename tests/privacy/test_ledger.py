"""The ledger: what was spent is kept, whatever kills a run, and nobody can change it unseen."""

import json
import math

import pytest

from fedlens.privacy.accountant import epsilon
from fedlens.privacy.events import Release
from fedlens.privacy.ledger import Entry, Ledger, Limit, LimitReached, total

EACH = Release(1.1, "poisson", 0.1)


def entry(round: int = 1, run: str = "a", data: str = "digits", release: Release = EACH) -> Entry:
    return Entry(data, "name", "client", run, round, release)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "folder" / "ledger.jsonl"


@pytest.fixture
def three(path):
    ledger = Ledger(path)
    for round in (1, 2, 3):
        ledger.order([entry(round)])
    return path


def test_what_was_spent_on_data_is_composed_over_experiments(path):
    one, two = Ledger(path), Ledger(path)
    for round in (1, 2):
        one.order([entry(round)])
        two.order([entry(round, run="b", release=Release(2.0))])
    one.order([entry(data="letters")])
    spent = Ledger(path).spent("digits", "client")
    expected = epsilon([Release(1.1, "poisson", 0.1, count=2), Release(2.0, count=2)], 1e-5)
    assert total(spent, 1e-5) == pytest.approx(expected, rel=1e-6)
    apart = [
        epsilon([Release(1.1, "poisson", 0.1, count=2)], 1e-5),
        epsilon([Release(2.0, count=2)], 1e-5),
    ]
    assert expected < sum(apart)  # ε do not add up
    assert Ledger(path).spent("digits", "example") == []


def test_releases_of_both_relations_are_counted_by_the_stricter_one():
    both = [Release(2.0), Release(2.0, "fixed", 0.1, "replace")]
    expected = epsilon([Release(2.0, neighbours="replace"), both[1]], 1e-5)
    assert total(both, 1e-5) == expected
    assert expected > epsilon([Release(2.0)], 1e-5)


def test_a_round_that_is_run_again_counts_once_and_must_be_the_same(three):
    again = Ledger(three)
    again.order([entry(3)])
    assert len(Ledger(three).entries) == 3
    with pytest.raises(ValueError, match="round 3"):
        again.order([entry(3, release=Release(9.0))])


def test_any_change_to_a_whole_line_is_seen(three):
    lines = three.read_bytes().splitlines(keepends=True)
    for number in (0, 1, 2):
        changed = json.loads(lines[number])
        changed["entry"]["release"]["noise"] = 5.0
        forged = [*lines]
        forged[number] = json.dumps(changed).encode() + b"\n"
        for content in (forged, [*lines[:number], *lines[number + 1 :]], lines[::-1]):
            if content == lines[:2]:  # the last line taken away cannot be seen
                continue
            three.write_bytes(b"".join(content))
            with pytest.raises(ValueError, match="was changed"):
                Ledger(three)


@pytest.mark.parametrize(
    "junk", [b"{}\n", b"null\n", b"\xff\n", b'{"entry": 1, "chain": "x"}\n', b"\n"]
)
def test_lines_that_are_none_of_ours_are_refused(three, junk):
    three.write_bytes(three.read_bytes() + junk)
    with pytest.raises(ValueError, match="line 4"):
        Ledger(three)


def test_a_last_line_that_is_torn_stands_for_nothing_and_is_replaced(three):
    whole = three.read_bytes()
    start = whole[:-1].rfind(b"\n") + 1
    for cut in range(start, len(whole)):
        three.write_bytes(whole[:cut])
        ledger = Ledger(three)
        assert [one.round for one in ledger.entries] == [1, 2]
        ledger.order([entry(3)])
        assert three.read_bytes() == whole


def test_a_ledger_that_was_cut_while_a_run_uses_it_is_refused(three):
    ledger = Ledger(three)
    three.write_bytes(b"".join(three.read_bytes().splitlines(keepends=True)[:2]))
    with pytest.raises(ValueError, match="was changed"):
        ledger.order([entry(4)])


def test_a_limit_is_kept_by_all_who_share_the_ledger(path):
    one, two = Ledger(path), Ledger(path)
    limit = epsilon([Release(1.1, "poisson", 0.1, count=3)], 1e-5) + 1e-6
    one.set_limit(Limit(limit, 1e-5))
    one.order([entry(1)])
    two.order([entry(1, run="b")])
    assert two.allows("digits", "client", [EACH])
    one.order([entry(2)])
    with pytest.raises(LimitReached, match="limit"):
        two.order([entry(2, run="b")])
    two.order([entry(2, run="b", data="letters")])  # each data set has its own
    assert len(Ledger(path).entries) == 4


def test_releases_without_noise_pass_every_limit(path):
    ledger = Ledger(path)
    ledger.set_limit(Limit(100.0, 1e-5))
    with pytest.raises(LimitReached):
        ledger.order([entry(release=Release(0.0))])
    assert total([Release(0.0)], 1e-5) == math.inf


@pytest.mark.parametrize("limit", [Limit(0.0, 1e-5), Limit(1.0, 0.0), Limit(math.nan, 1e-5)])
def test_a_limit_that_is_none_is_refused(path, limit):
    with pytest.raises(ValueError, match=r"limit|delta"):
        Ledger(path).set_limit(limit)


def test_a_ledger_where_no_file_can_be_is_refused_before_anything_runs(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="cannot be written"):
        Ledger(tmp_path / "file" / "ledger.jsonl").check_writable()
    with pytest.raises(ValueError, match="cannot be read"):
        Ledger(tmp_path)
