"""Outcomes of runs: the accuracy of successful ones, and when the others diverged."""

from __future__ import annotations

import math
from dataclasses import replace

from fedlens.recipes.page import mean_of
from fedlens.recipes.recipe import Measured, Results
from fedlens.report.numbers import NONE
from fedlens.runs.records import Run

KNOWS_NOTHING = math.log(10)  # the loss of a network that finds all classes equally likely


def reached(results: Results, cell: str) -> Measured | str:
    """The accuracy of a cell over its last quarter; its `outcome` as text if runs diverged."""
    return results.late(cell) if results.diverged(cell) is None else outcome(results, cell)


def outcome(results: Results, cell: str) -> str:
    """A text: the accuracy of a cell's successful runs, and how many failed in which way."""
    runs = results.runs[cell]
    if not runs:
        return NONE
    alive = [run for run in runs if not _has_failed(run)]
    sure = sum(run.status != "diverged" and _is_sure_of_one(run) for run in runs)
    words = []
    if alive:
        words.append(mean_of(replace(results, runs={cell: alive}).late(cell), 1, times=100))
    if sure:
        words.append(f"one class for all ({sure} of {len(runs)})")
    if ended := results.when_diverged(cell):
        words.append(ended)
    return ", ".join(words)


def failed(results: Results, cell: str) -> bool:
    """Whether a run diverged, or ended with one class for all images."""
    return any(map(_has_failed, results.runs[cell]))


def _has_failed(run: Run) -> bool:
    return run.status == "diverged" or _is_sure_of_one(run)


def _is_sure_of_one(run: Run) -> bool:
    """Whether it ended with one class for all images and a loss above ln 10, that of guessing."""
    loss = run.final("test_loss") or math.inf
    return bool(run.summary["collapsed"]) and loss > KNOWS_NOTHING + 0.01
