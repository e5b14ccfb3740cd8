"""Rounds of several experiments, whose clients train as one cohort: each as it would be alone."""

from dataclasses import dataclass, replace

import pytest
import torch

from fedlens.algorithm import same_but_numbers, side_by_side, slots
from fedlens.algorithm.pieces import GradientDescent, Objective, Sgd
from tests.papers_under_test import ALGORITHMS, BASE
from tests.side_by_side import everything, points, train

STACKED = [name for name, one in ALGORITHMS.items() if one.pace is None]
DOUBLE = torch.zeros(0, dtype=torch.float64)


@pytest.mark.parametrize("name", STACKED)
def test_each_experiment_is_what_it_would_be_alone(name):
    turns = points(ALGORITHMS[name], "batch")
    found, records = train("stacked", "batch", turns)
    for turn, state, record in zip(turns, found, records, strict=True):
        (alone,), (expected,) = train("stacked", "batch", [turn])
        torch.testing.assert_close(everything(state), everything(alone), rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(record, expected, rtol=1e-9, atol=1e-11, equal_nan=True)


@pytest.mark.parametrize("name", STACKED)
def test_recorded_rounds_of_several_experiments_are_the_same(name):
    turns = points(ALGORITHMS[name], "group")
    expected, expected_records = train("stacked", "group", turns, rounds=4)
    found, records = train("stacked, recorded", "group", turns, rounds=4)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(everything(one), everything(other), rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(records, expected_records, rtol=1e-9, atol=1e-11, equal_nan=True)


@pytest.mark.parametrize("engine", ["sequential", "stacked, two at a time"])
def test_engines_agree_on_several_experiments(engine):
    turns = points(ALGORITHMS["fedprox"], "batch")
    expected, _ = train("stacked", "batch", turns)
    found, _ = train(engine, "batch", turns)
    for one, two in zip(found, expected, strict=True):
        torch.testing.assert_close(everything(one), everything(two), rtol=1e-9, atol=1e-11)


def test_a_cohort_of_two_seeds_differs_from_each_alone_in_the_last_bits_at_most():
    first, _, last = points(BASE, "none")
    found, _ = train("stacked", "none", [first, last])
    for turn, state in zip((first, last), found, strict=True):
        (alone,), _ = train("stacked", "none", [turn])
        torch.testing.assert_close(state.params, alone.params, rtol=1e-14, atol=1e-16)


def test_an_experiment_that_is_lost_takes_no_other_with_it():
    first, second, _ = points(BASE, "batch")
    broken = {name: torch.full_like(p, torch.nan) for name, p in second.state.params.items()}
    lost = replace(second, state=replace(second.state, params=broken))
    (sound, unsound), _ = train("stacked", "batch", [first, lost])
    (alone,), _ = train("stacked", "batch", [first])
    torch.testing.assert_close(everything(sound), everything(alone), rtol=1e-9, atol=1e-11)
    assert all(p.isnan().any() for p in unsound.params.values())


@dataclass(frozen=True)
class Penalty(slots.Penalty):
    """One of a user's own, which does not say that its number may be a tensor."""

    mu: float

    def __call__(self, local):
        return torch.stack([self.mu * p.abs().sum() for p in local.params.values()]).sum()


def test_fillings_are_alike_if_they_differ_in_numbers_alone():
    assert same_but_numbers(Sgd(0.1), Sgd(0.2, momentum=0.9))
    assert not same_but_numbers(Sgd(0.1), Sgd(0.1, nesterov=True))
    assert not same_but_numbers(GradientDescent(0.1), Sgd(0.1))
    assert not same_but_numbers(GradientDescent(0.1, passes=1), GradientDescent(0.1, passes=2))
    one, two = (Objective(penalties=(Penalty(mu),)) for mu in (0.1, 0.2))
    assert same_but_numbers(one, one) and not same_but_numbers(one, two)
    assert not same_but_numbers(one, Objective())


def test_only_numbers_that_differ_become_tensors():
    merged = side_by_side([Sgd(0.1, 0.9), Sgd(0.2, 0.9)], DOUBLE)
    assert merged.momentum == 0.9
    assert isinstance(merged.lr, torch.Tensor) and merged.lr.tolist() == [0.1, 0.2]
