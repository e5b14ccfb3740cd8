from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedlens.core.federation import AT_ONCE, Examples, Federation, Fixed, Holdings, Pool, Split
from fedlens.data.emd import BLOCK, emd, emd_per_client
from fedlens.data.partitions.by_draw import Drawn, drawn
from fedlens.data.statistics import Counts, describe, summary


@st.composite
def label_counts(draw: st.DrawFn) -> Tensor:
    num_clients, num_classes = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    row = st.lists(st.integers(0, 50), min_size=num_classes, max_size=num_classes)
    counts = draw(st.lists(row, min_size=num_clients, max_size=num_clients))
    return torch.tensor(counts) + torch.eye(num_clients, num_classes, dtype=torch.int64)


def test_one_class_each_is_as_far_apart_as_can_be() -> None:
    assert emd(500 * torch.eye(10, dtype=torch.int64)) == pytest.approx(1.8)
    assert emd(5 * torch.eye(100, dtype=torch.int64)) == pytest.approx(1.98)


def test_clients_with_the_same_shares_are_not_apart() -> None:
    assert emd(torch.tensor([[1, 2, 3], [10, 20, 30], [2, 4, 6]])) == pytest.approx(0, abs=1e-12)


def test_large_clients_weigh_more() -> None:
    counts = torch.tensor([[3, 0], [0, 1]])
    assert emd_per_client(counts).tolist() == pytest.approx([0.5, 1.5])
    assert emd(counts) == pytest.approx(0.75 * 0.5 + 0.25 * 1.5)


@given(label_counts())
def test_splitting_a_client_in_two_identical_halves_changes_nothing(counts: Tensor) -> None:
    halves = torch.cat([counts[:1], counts[:1], 2 * counts[1:]])
    assert emd(halves) == pytest.approx(emd(2 * counts), abs=1e-12)


@given(label_counts())
def test_it_lies_between_zero_and_two(counts: Tensor) -> None:
    assert 0 <= emd(counts) < 2


@given(label_counts())
def test_a_client_without_examples_changes_nothing(counts: Tensor) -> None:
    more = torch.cat([counts, torch.zeros_like(counts[:1])])
    assert emd(more) == pytest.approx(emd(counts))
    assert emd_per_client(more)[-1] == 0


def test_no_examples_at_all_are_not_apart() -> None:
    assert emd(torch.zeros(2, 3, dtype=torch.int64)) == 0


LABELS = torch.tensor([0, 0, 1, 1, 2, 2])
HELD = Holdings.of([torch.tensor([0, 1]), torch.tensor([2, 3, 4])])


def federation(split: Split) -> Federation:
    return Federation(Examples(torch.zeros(6, 1, 2, 2, dtype=torch.uint8), LABELS), 3, split)


def counted(holdings: Holdings) -> Counts:
    return Counts.of(federation(Fixed(holdings)))


def test_a_summary_is_json_with_four_keys() -> None:
    found = summary(counted(HELD))
    distance = found.pop("emd")
    assert distance == pytest.approx(0.4 * 1.2 + 0.6 * 0.8)
    assert json.loads(json.dumps(found)) == {
        "num_clients": 2,
        "sizes": [2, 3],
        "label_counts": [[2, 0, 0], [0, 2, 1]],
    }


def test_a_description_says_what_is_held() -> None:
    assert describe(counted(HELD)) == [
        "2 clients hold 5 of 6 examples",
        "examples per client: 2 to 3, median 2.5",
        "classes per client: 1 to 2, median 1.5",
        "EMD: 0.960 (0: all clients alike; 2: nothing in common)",
    ]


def test_a_description_of_equal_clients_gives_one_number() -> None:
    equal = Holdings.of([torch.tensor([0, 2]), torch.tensor([1, 3])])
    assert describe(counted(equal))[1:3] == ["examples per client: 2", "classes per client: 2"]


def test_many_clients_who_draw_are_counted_some_at_a_time_and_told_of(monkeypatch) -> None:
    rng = np.random.default_rng(0)
    pool = Pool(federation(Fixed(HELD)).examples, 3, 2 * AT_ONCE + 5, rng)
    split = drawn(pool, per_class=1)
    everyone = federation(split).everyone(0)
    asked: list[int] = []

    def holdings(self: Drawn, round: int, cohort: Tensor) -> Holdings:
        asked.append(len(cohort))
        return drawn_by(self, round, cohort)

    drawn_by = Drawn.holdings
    monkeypatch.setattr(Drawn, "holdings", holdings)
    told: list[tuple[int, int]] = []
    found = Counts.of(federation(split), lambda *done: told.append(done))
    assert torch.equal(found.by_class, everyone.label_counts(LABELS, 3))
    assert found.num_held == len(everyone.index.unique())
    assert asked == [AT_ONCE, AT_ONCE, 5]
    assert told == [(done, 2 * AT_ONCE + 5) for done in (AT_ONCE, 2 * AT_ONCE, 2 * AT_ONCE + 5)]


def test_the_distance_of_many_clients_is_that_of_all_together() -> None:
    counts = np.random.default_rng(0).integers(0, 9, (2 * BLOCK + 3, 4))
    whole = float(counts.sum(1) @ emd_per_client(counts) / counts.sum())
    assert emd(counts) == pytest.approx(whole, rel=1e-12)
