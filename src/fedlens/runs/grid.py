"""A grid: every combination of given values for keys of an experiment."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Integral
from typing import Any

import numpy as np

from fedlens.config.experiment import Experiment, Named
from fedlens.storage.tables import apply_override, parse_axis, to_value


def grid(
    base: Experiment, axes: Mapping[str, Sequence[Any]], seeds: int | None = None
) -> dict[str, Experiment]:
    """Every combination of values of keys (`{"local.lr": [0.1, 0.2]}`), by name.

    Each combination is repeated with `seeds` seeds, counted from the seed of `base`.
    """
    points = {}
    for name, changes in combinations(axes, seeds, base.seed).items():
        with naming(name):
            points[name] = _changed(base, changes)
    return points


@contextmanager
def naming(point: str) -> Iterator[None]:
    """Add the name of a point of a sweep to its errors."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{error} (point {point})") from error


def combinations(
    axes: Mapping[str, Sequence[Any]], seeds: int | None, first_seed: int
) -> dict[str, list[str]]:
    """The points of a grid: the overrides of each, by name."""
    axes = {key: _plain(choice) for key, choice in axes.items()}
    if seeds is not None:
        if not isinstance(seeds, Integral):
            raise ValueError(f"seeds is {seeds!r}: give how many, or a grid of seed")
        if seeds < 1:
            raise ValueError(f"seeds is {seeds}: choose 1 or more")
        if "seed" in axes:
            raise ValueError("both a number of seeds and a grid of seed are given: leave one out")
        axes["seed"] = range(first_seed, first_seed + seeds)
    if not axes:
        raise ValueError(
            "a sweep needs values to go through: give a grid (--grid), or how many seeds (--seeds)"
        )
    for key, choice in axes.items():
        if isinstance(choice, str) or not isinstance(choice, Sequence):
            raise ValueError(f"{key} is given {choice!r}: give its values in a list")
        if not choice:
            raise ValueError(f"{key} has no values: give at least one")
    endings = Counter(key.rpartition(".")[2] for key in axes)
    short = {key: key.rpartition(".")[2] for key in axes}
    short = {key: last if endings[last] == 1 else key for key, last in short.items()}
    points = {}
    for values in itertools.product(*axes.values()):
        chosen = dict(zip(axes, values, strict=True))
        name = ",".join(f"{short[key]}={_word(value)}" for key, value in chosen.items())
        if name in points:
            raise ValueError(f"two points of the sweep are called {name}: give each value once")
        points[name] = [f"{key}={to_value(value)}" for key, value in chosen.items()]
    return points


def parse_axes(axes: Sequence[str], overrides: Sequence[str] = ()) -> dict[str, list[Any]]:
    """Values by key, from `local.lr=0.01,0.1`; no key may be given twice or also be overridden."""
    found: dict[str, list[Any]] = {}
    for key, values in map(parse_axis, axes):
        if key in found:
            raise ValueError(f"{key} has two grids: give all its values in one, {key}=A,B")
        found[key] = values
    for override in overrides:
        key = override.partition("=")[0].strip()
        if key in found:
            raise ValueError(f"{override} is for all points, but {key} has a grid: leave one out")
    return found


def _plain(value: Any) -> Any:
    """A value from Python (`Named`, NumPy) in the form of a TOML file, also within lists."""
    if isinstance(value, Named):
        return {"name": value.name, **value.options} if value.options else value.name
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    return [_plain(one) for one in value] if isinstance(value, (list, tuple)) else value


def _word(value: Any) -> str:
    """A value as part of a folder name."""
    text = value if isinstance(value, str) else to_value(value)
    text = text.replace("{ name = ", "")  # an algorithm with options, also in a list
    text = re.sub(r"[^\w.+-]+", "\0", text).strip("\0")  # a minus sign at the front stays
    return text.replace("\0", "-")


def _changed(base: Experiment, overrides: Sequence[str]) -> Experiment:
    before = base.plain()
    tables = base.plain()
    for override in overrides:
        apply_override(tables, override)
    for name in ("dataset", "model"):
        if tables[name] == before[name]:  # keep an object given from Python
            tables[name] = getattr(base, name)
    return Experiment.of(tables)
