from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedlens.data.emd import emd, emd_per_client
from fedlens.data.statistics import describe, summary
from fedlens.federation import Holdings


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


def test_a_summary_is_json_with_four_keys() -> None:
    found = summary(HELD, LABELS, 3)
    distance = found.pop("emd")
    assert distance == pytest.approx(0.4 * 1.2 + 0.6 * 0.8)
    assert json.loads(json.dumps(found)) == {
        "num_clients": 2,
        "sizes": [2, 3],
        "label_counts": [[2, 0, 0], [0, 2, 1]],
    }


def test_a_description_says_what_is_held() -> None:
    assert describe(HELD, LABELS, 3) == [
        "2 clients hold 5 of 6 examples",
        "examples per client: 2 to 3, median 2.5",
        "classes per client: 1 to 2, median 1.5",
        "EMD: 0.960 (0: all clients alike; 2: nothing in common)",
    ]


def test_a_description_of_equal_clients_gives_one_number() -> None:
    equal = Holdings.of([torch.tensor([0, 2]), torch.tensor([1, 3])])
    assert describe(equal, LABELS, 3)[1:3] == ["examples per client: 2", "classes per client: 2"]
