"""Schedules: numbers of an experiment that change from round to round.

A schedule is a function of the round, counted from 0, and of the number of rounds; an experiment
file sets its options. Schedules that PyTorch also has agree with those of PyTorch.
"""

from __future__ import annotations

import math
from typing import Annotated

from fedlens.config.names import SCHEDULES
from fedlens.config.options import Bounds, Named, call
from fedlens.config.sections import Count

MOST = 10_000  # rounds, approximately, for which a schedule is checked


def constant(round: int, of: int, *, start: float) -> float:
    """The same in every round."""
    return start


def exponential(round: int, of: int, *, start: float, decay: float) -> float:
    """`start`, times `decay` for every round that is over."""
    return start * decay**round


def step(round: int, of: int, *, start: float, every: Count, decay: float = 0.1) -> float:
    """`start`, times `decay` after every `every` rounds."""
    return start * decay ** (round // every)


def cosine(
    round: int, of: int, *, start: float, end: float = 0.0, rounds: Count | None = None
) -> float:
    """From `start` to `end` along half a cosine, over `rounds`: without it, over all there are."""
    return end + (start - end) * (1 + math.cos(math.pi * _share(round, of, rounds))) / 2


def polynomial(
    round: int,
    of: int,
    *,
    start: float,
    end: float = 0.0,
    power: Annotated[float, Bounds(above=0)] = 1.0,
    rounds: Count | None = None,
) -> float:
    """From `start` to `end` by a power of what is left of `rounds`; with power 1 in a line."""
    left: float = (1 - _share(round, of, rounds)) ** power
    return end + (start - end) * left


def piecewise(round: int, of: int, *, values: list[float], at: list[Count]) -> float:
    """The first of `values` and, from the end of each round of `at` on, the next."""
    if len(values) != len(at) + 1:
        counts = f"values has {len(values)} and at {len(at)}"
        raise ValueError(f"piecewise: {counts}: give one more value than rounds of at")
    if at != sorted(set(at)):
        raise ValueError(f"piecewise: at is {at}: let the rounds grow")
    return values[sum(round >= change for change in at)]


def warm_up(
    round: int, of: int, *, rounds: Count, then: Annotated[float | Named, SCHEDULES]
) -> float:
    """Rise linearly to the first value of `then`, a number or a schedule, which then takes over.

    The first of the `rounds` has its share of that value, the last has all of it.
    """
    if round < rounds:
        return (round + 1) / rounds * _value(then, 0, of - rounds)
    return _value(then, round - rounds, of - rounds)


def value_at(schedule: Named, round: int, rounds: int) -> float:
    """The value of a schedule in a round, counted from 0, of `rounds`."""
    try:
        value = call(SCHEDULES.find(schedule.name), round, rounds, options=schedule.options)
    except ArithmeticError:  # beyond the range of floats
        value = math.inf
    if not isinstance(value, int | float) or not math.isfinite(value):
        gave = f"schedule {schedule.name!r} gave {value!r} in round {round + 1}"
        raise ValueError(f"{gave}: it must be a finite number")
    return float(value)


def looked_at(rounds: int) -> list[int]:
    """The rounds for which a schedule is checked before it is used: all, if there are not many."""
    return [*range(0, rounds, max(rounds // MOST, 1)), rounds - 1]


def names_in(schedule: Named) -> list[str]:
    """The name of a schedule, and the names of the schedules in it."""
    inner = [value for value in schedule.options.values() if isinstance(value, Named)]
    return [schedule.name, *(name for one in inner for name in names_in(one))]


def _value(given: float | Named, round: int, rounds: int) -> float:
    return value_at(given, round, max(rounds, 1)) if isinstance(given, Named) else given


def _share(round: int, of: int, rounds: int | None) -> float:
    """The share of `rounds` that is over, or of all rounds if that is None."""
    whole = of if rounds is None else rounds
    return min(round / whole, 1.0)
