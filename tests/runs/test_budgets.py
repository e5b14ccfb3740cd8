"""Accuracy by what was spent."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fedlens as fl
from fedlens.runs.records import Record, at_batches, at_round_numbers, at_rounds, rounds_to

RECORDS: list[Record] = [
    {"round": 1, "batches": 10},
    {"round": 2, "batches": 10, "test_accuracy": 0.5},
    {"round": 3, "batches": 30},
    {"round": 4, "batches": 10, "test_accuracy": 0.8, "test_f1": None},
    {"round": 5, "batches": 10, "test_accuracy": 0.7, "test_f1": 0.9},
]


@pytest.mark.parametrize(
    ("target", "round"), [(0.5, 2), (0.51, 4), (0.8, 4), (0.81, None), (0.0, 2)]
)
def test_the_first_round_that_reaches_a_target_is_found(target, round):
    assert rounds_to(RECORDS, target) == round


def test_any_measure_can_be_asked_for_and_what_is_no_number_is_passed_over():
    assert rounds_to(RECORDS, 0.1, "test_f1") == 5
    assert rounds_to([{"round": 1, "test_f1": math.nan}], 0.1, "test_f1") is None
    assert at_rounds(RECORDS, [4, 5], "test_f1") == {4: None, 5: 0.9}
    assert rounds_to([], 0.1) is None
    assert at_batches([], [1]) == at_rounds([], [1]) == {1: None}


def test_accuracy_at_a_number_of_rounds_is_the_last_one_evaluated_by_then():
    found = at_rounds(RECORDS, range(1, 7))
    assert found == {1: None, 2: 0.5, 3: 0.5, 4: 0.8, 5: 0.7, 6: None}


def test_accuracy_at_a_number_of_batches_adds_up_those_of_the_largest_client():
    found = at_batches(RECORDS, [19, 20, 59, 60, 69, 70, 71])
    assert found == {19: None, 20: 0.5, 59: 0.5, 60: 0.8, 69: 0.8, 70: 0.7, 71: None}


@given(st.lists(st.floats(0, 1), min_size=1, max_size=9), st.floats(0, 1))
def test_the_round_that_is_found_is_the_first_that_is_good_enough(accuracies, target):
    records = [{"round": n, "batches": 1, "test_accuracy": a} for n, a in enumerate(accuracies, 1)]
    found = rounds_to(records, target)
    early = accuracies if found is None else accuracies[: found - 1]
    assert all(a < target for a in early)
    assert found is None or at_batches(records, [found])[found] >= target


def test_a_summary_has_the_accuracy_at_round_numbers_that_were_spent():
    assert at_round_numbers(RECORDS) == {
        "at_rounds": {"2": 0.5, "5": 0.7},
        "at_batches": {"20": 0.5, "50": 0.5},
    }
    many = [{"round": n, "batches": 7, "test_accuracy": n / 1000} for n in range(1, 201)]
    found = at_round_numbers(many)
    assert list(found["at_rounds"]) == ["1", "2", "5", "10", "20", "50", "100", "200"]
    assert list(found["at_batches"])[-2:] == ["500", "1000"]
    assert found["at_batches"]["1000"] == 142 / 1000  # 142 rounds took 994 batches
    assert at_round_numbers([]) == {"at_rounds": {}, "at_batches": {}}


def test_a_run_is_asked_as_it_is_and_its_summary_adds_up_batches():
    experiment = fl.Experiment(
        dataset=fl.Named("fashion-mnist-mini"),
        model=fl.Named("linear"),
        rounds=4,
        clients=fl.Clients(
            count=4, partition=fl.Named("proportions", {"sizes": [0.1, 0.1, 0.2, 0.6]})
        ),
        evaluate=fl.Evaluate(every=2),
    )
    result = fl.run(experiment)
    per_round = math.ceil(3600 / 32)  # of the client with 6 tenths of 6,000 examples
    assert [record["batches"] for record in result.records] == [per_round] * 4
    assert result.summary["batches"] == 4 * per_round
    second, last = (result.records[n]["test_accuracy"] for n in (1, 3))
    found = at_batches(result.records, [3 * per_round, 4 * per_round])
    assert list(found.values()) == [second, last]
