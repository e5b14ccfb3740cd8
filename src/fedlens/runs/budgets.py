"""How good a run is at a given budget of rounds or batches.

Batches are those of the client with the most batches in each round, summed over rounds: clients
train in parallel, so that client determines how long a round lasts (Hsu et al. 2020).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from fedlens.runs.records import is_number

Records = Sequence[Mapping[str, Any]]
"""The records of a run in order, one per round, as in `Result.records` and rounds.jsonl."""


def rounds_to(records: Records, target: float, key: str = "test_accuracy") -> int | None:
    """The first round in which a measure was at least `target`, or None if there is none."""
    reached = (r["round"] for r in records if is_number(r.get(key)) and r[key] >= target)
    return next(reached, None)


def clock_at(records: Records, target: float, key: str = "test_accuracy") -> float | None:
    """The time on the virtual clock when a measure first was at least `target`, or None."""
    reached = (r["clock"] for r in records if is_number(r.get(key)) and r[key] >= target)
    return next(reached, None)


def at_rounds(
    records: Records, budgets: Iterable[int], key: str = "test_accuracy"
) -> dict[int, float | None]:
    """By budget: the last value of the measure within this many rounds.

    It is None if the run was not evaluated by then, or has fewer rounds.
    """
    return _at(records, [record["round"] for record in records], budgets, key)


def at_batches(
    records: Records, budgets: Iterable[int], key: str = "test_accuracy"
) -> dict[int, float | None]:
    """By budget: the last value of the measure within this many batches.

    It is None if the run was not evaluated by then, or has fewer batches.
    """
    return _at(records, list(accumulate(r["batches"] for r in records)), budgets, key)


def at_round_numbers(records: Records, key: str = "test_accuracy") -> dict[str, dict[str, float]]:
    """The measure at 1, 2, 5, 10, 20, 50, ... rounds and batches, for a summary.

    Budgets that the run did not spend, or that end before its first evaluation, are left out.
    """
    rounds = at_rounds(records, round_numbers(len(records)), key)
    batches = at_batches(records, round_numbers(sum(r["batches"] for r in records)), key)
    return {
        name: {str(budget): value for budget, value in found.items() if value is not None}
        for name, found in (("at_rounds", rounds), ("at_batches", batches))
    }


def round_numbers(most: int) -> Iterator[int]:
    """1, 2, 5, 10, 20, 50, ... up to `most`."""
    for power in range(len(str(most))):
        yield from (n * 10**power for n in (1, 2, 5) if n * 10**power <= most)


def _at(
    records: Records, spent: Sequence[int], budgets: Iterable[int], key: str
) -> dict[int, float | None]:
    found: dict[int, float | None] = {}
    for budget in budgets:
        within = [
            record[key]
            for record, cost in zip(records, spent, strict=True)
            if cost <= budget and is_number(record.get(key))
        ]
        got_so_far = bool(spent) and spent[-1] >= budget
        found[budget] = within[-1] if within and got_so_far else None
    return found
