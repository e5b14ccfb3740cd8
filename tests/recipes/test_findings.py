"""The statistics that all findings share."""

import math
from types import SimpleNamespace
from typing import Any

import pytest

from fedlens.recipes.findings.items import ahead, compared, evaluated, levels, read_out, volatile
from fedlens.recipes.recipe import Results, Scale
from fedlens.report.pairs import estimate


def run_of(seed: int, values: list[float], every: int = 1, **more: Any) -> Any:
    rounds = [*range(1, len(values) + 1)]
    return SimpleNamespace(
        manifest={"seed": seed}, status=more.get("status", "finished"),
        experiment={"evaluate": {"every": every}}, curve=lambda _: (rounds, values),
    )  # fmt: skip


def test_a_run_counts_by_its_last_ten_regular_evaluations():
    values = [0.0] * 10 + [0.1 * k for k in range(10)]
    assert read_out(run_of(0, values)) == pytest.approx(0.45)
    assert evaluated(run_of(0, values, every=5)) == [0.0, 0.0, values[14], values[19]]
    assert math.isnan(read_out(run_of(0, values, status="diverged")))


def test_intervals_hold_together_and_p_values_are_corrected_for_the_comparisons_shown():
    ends = {"a": [0.5, 0.6, 0.7], "b": [0.4, 0.52, 0.58], "c": [0.5, 0.5, 0.5]}
    runs = {cell: [run_of(k, [y]) for k, y in enumerate(of)] for cell, of in ends.items()}
    results: Any = Results(Scale("smoke"), runs)
    sums = {"a − b": ahead("a", "b"), "a − c": ahead("a", "c")}
    (first, second) = compared(results, sums).rows
    wide = estimate([0.1, 0.08, 0.12], 0.975)
    assert wide.low is not None and wide.p is not None
    assert first[:3] == ["a − b", "10.00", f"{100 * wide.low:.2f} to {100 * (0.2 - wide.low):.2f}"]
    assert first[3:] == [f"p = {2 * wide.p:.3f}", "3"] and second[0] == "a − c"
    (alone,) = compared(results, {"a − b": sums["a − b"]}).rows
    assert alone[3] == f"p = {wide.p:.3f}"
    assert levels(results, runs).rows[2] == ["c", "50.00 ± 0.00", "3"]


def test_only_seeds_that_all_runs_of_a_comparison_have_are_paired():
    runs = {"a": [run_of(k, [0.5 + k / 10]) for k in (0, 1, 2)], "b": [run_of(1, [0.4])]}
    results: Any = Results(Scale("smoke"), runs)
    (row,) = compared(results, {"a − b": ahead("a", "b")}).rows
    assert row == ["a − b", "20.00", "–", "–", "1"]
    assert compared(results, {"a − d": ahead("a", "d")}).rows == []


def test_a_run_that_goes_up_and_down_is_volatile_and_one_that_stays_is_not():
    assert volatile(run_of(0, [0.1, 0.9, 0.4, 0.6, 0.4, 0.6])) == pytest.approx(0.2)
    assert volatile(run_of(0, [0.1, 0.9, 0.5, 0.5, 0.5, 0.5])) == 0
