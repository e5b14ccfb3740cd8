"""Schedules: numbers of an experiment that change from round to round.

A schedule is a function of the round, counted from 0, and of the number of rounds; an experiment
file sets its options. Schedules that PyTorch also has agree with those of PyTorch.
"""

from __future__ import annotations

import math
from typing import Any, get_args

from fedlens.config.names import SCHEDULES
from fedlens.config.options import Named, call, find, nearest, resolve

MOST = 10_000  # rounds, approximately, for which a schedule is checked


def constant(round: int, of: int, *, start: float) -> float:
    """The same in every round."""
    return start


def exponential(round: int, of: int, *, start: float, decay: float) -> float:
    """`start`, times `decay` for every round that is over."""
    return start * decay**round


def step(round: int, of: int, *, start: float, every: int, decay: float = 0.1) -> float:
    """`start`, times `decay` after every `every` rounds."""
    _demand(every >= 1, f"every is {every}: choose 1 or more")
    return start * decay ** (round // every)


def cosine(
    round: int, of: int, *, start: float, end: float = 0.0, rounds: int | None = None
) -> float:
    """From `start` to `end` along half a cosine, over `rounds`: without it, over all there are."""
    return end + (start - end) * (1 + math.cos(math.pi * _share(round, of, rounds))) / 2


def polynomial(
    round: int,
    of: int,
    *,
    start: float,
    end: float = 0.0,
    power: float = 1.0,
    rounds: int | None = None,
) -> float:
    """From `start` to `end` by a power of what is left of `rounds`; with power 1 in a line."""
    _demand(power > 0, f"power is {power:g}: choose a number above 0")
    left: float = (1 - _share(round, of, rounds)) ** power
    return end + (start - end) * left


def piecewise(round: int, of: int, *, values: list[float], at: list[int]) -> float:
    """The first of `values` and, from the end of each round of `at` on, the next."""
    counts = f"values has {len(values)} and at {len(at)}"
    _demand(len(values) == len(at) + 1, f"{counts}: give one more value than rounds of at")
    _demand(at == sorted(set(at)) and min(at, default=1) >= 1, f"at is {at}: let the rounds grow")
    return values[sum(round >= change for change in at)]


def warm_up(round: int, of: int, *, rounds: int, then: float | dict[str, Any]) -> float:
    """Rise linearly to the first value of `then`, a number or a schedule, which then takes over.

    The first of the `rounds` has its share of that value, the last has all of it.
    """
    _demand(rounds >= 1, f"rounds is {rounds}: choose 1 or more")
    if round < rounds:
        return (round + 1) / rounds * _value(then, 0, of - rounds)
    return _value(then, round - rounds, of - rounds)


class Unfit(ValueError):
    """Invalid options of a schedule."""


def value_at(schedule: Named, round: int, rounds: int) -> float:
    """The value of a schedule in a round, counted from 0, of `rounds`."""
    what = f"schedule {schedule.name!r}"
    try:
        function = find(SCHEDULES, schedule.name, "schedule")
        value = call(function, round, rounds, options=schedule.options)
    except ArithmeticError:  # beyond the range of floats
        value = math.inf
    except Unfit as error:
        raise Unfit(f"{what}: {error}") from error
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{what} gave {value!r} in round {round + 1}: it must be a finite number")
    return float(value)


def looked_at(rounds: int) -> list[int]:
    """The rounds for which a schedule is checked before it is used: all, if there are not many."""
    return [*range(0, rounds, max(rounds // MOST, 1)), rounds - 1]


def resolved(schedule: Named, where: str) -> Named:
    """The schedule with every option checked or set to its default."""
    name = schedule.name
    if not (name in SCHEDULES or ":" in name or schedule.options or nearest(name, SCHEDULES)):
        names = ", ".join(SCHEDULES)
        raise ValueError(f"{where} is {name!r}: expected a number or a schedule ({names})")
    known = SCHEDULES.options(name, f"schedule of {where}")
    options = resolve(known, schedule.options, f"{where}: {schedule.name}")
    for key, value in options.items():
        if isinstance(value, dict):  # a schedule in a schedule
            inner = resolved(Named.of(value, f"{where}.{key}"), f"{where}.{key}")
            options[key] = {"name": inner.name, **inner.options}
    return Named(schedule.name, options)


def may_be_scheduled(kind: Any) -> bool:
    """Whether an option of this type, of an algorithm, may be a schedule: whether it is a float."""
    return float in (kind, *get_args(kind))


def names_in(schedule: Named) -> list[str]:
    """The name of a schedule, and the names of the schedules in it."""
    inner = [Named.of(value, "") for value in schedule.options.values() if isinstance(value, dict)]
    return [schedule.name, *(name for one in inner for name in names_in(one))]


def _value(given: float | dict[str, Any], round: int, rounds: int) -> float:
    if not isinstance(given, dict):
        return given
    return value_at(Named.of(given, "then"), round, max(rounds, 1))


def _share(round: int, of: int, rounds: int | None) -> float:
    """The share of `rounds` that is over, or of all rounds if that is None."""
    whole = of if rounds is None else rounds
    _demand(whole >= 1, f"rounds is {whole}: choose 1 or more")
    return min(round / whole, 1.0)


def _demand(fits: bool, remedy: str) -> None:
    if not fits:
        raise Unfit(remedy)
