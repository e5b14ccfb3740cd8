"""Groups of repeats: runs that differ in nothing but their seeds, and their joint results."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from typing import Any

from fedlens.evaluation import measures
from fedlens.report.blocks import Line, Style
from fedlens.report.numbers import NONE, format_number
from fedlens.runs.records import PART_NAMES, Run, is_number, primary_part, settings

SEEDS = ("seed", "clients.seed")


MANY = 8  # with more groups than this, pictures show the best ones


@dataclass(frozen=True)
class Group:
    """One experiment: a run, or several runs with different seeds."""

    name: str
    runs: tuple[Run, ...]
    settings: dict[str, Any]  # dotted keys, without the seeds

    def values(self, of: Callable[[Run], float | None]) -> list[float]:
        """The value of `of` for each run where it is not None."""
        return [value for run in self.runs if (value := of(run)) is not None]

    @property
    def is_sound(self) -> bool:
        """Whether all runs finished; other groups are never called the best."""
        return all(run.status == "finished" for run in self.runs)

    def finals(self, metric: str) -> list[float]:
        return self.values(lambda run: run.final(metric))


def group(runs: Sequence[Run]) -> list[Group]:
    """Group runs by experiment, in the given order.

    If two runs of an experiment have the same seed, each of its runs is a group of one.
    """
    together: dict[str, list[Run]] = {}
    for run in runs:
        together.setdefault(json.dumps(_without_seeds(run), default=str), []).append(run)
    groups: dict[str, list[Run]] = {}
    for key, members in together.items():
        if len({seed_of(run) for run in members}) == len(members):
            groups[key] = members
        else:
            groups |= {f"{key} {i}": [run] for i, run in enumerate(members)}
    names = names_by_difference([_without_seeds(members[0]) for members in groups.values()])
    return [
        Group(
            members[0].name if len(members) == 1 else name,
            tuple(members),
            _without_seeds(members[0]),
        )
        for name, members in zip(names, groups.values(), strict=True)
    ]


def best_first(groups: Sequence[Group], metric: str) -> list[Group]:
    """The groups: if there are more than `MANY`, sorted by final value, else in the given order."""
    if len(groups) <= MANY:
        return list(groups)
    ends = {id(one): fmean(found) if (found := one.finals(metric)) else -1.0 for one in groups}
    return sorted(groups, key=lambda one: -ends[id(one)])


def seed_of(run: Run) -> tuple[Any, ...]:
    """The seeds of a run, which distinguish it from its repeats."""
    flat = settings(run.experiment)
    return tuple(flat.get(key) for key in SEEDS)


def names_by_difference(many: Sequence[dict[str, Any]]) -> list[str]:
    """A name for each experiment: its algorithm, and the other settings that differ.

    Options of an algorithm are named only if experiments with that algorithm differ in them.
    """
    by_algorithm: dict[str, list[dict[str, Any]]] = {}
    for flat in many:
        by_algorithm.setdefault(_algorithm(flat), []).append(flat)
    differ = set(differing(many)) - {"algorithm"}
    own = {name: set(differing(alike)) for name, alike in by_algorithm.items()}
    names = []
    for flat in many:
        words = [_algorithm(flat)]
        for key, value in flat.items():
            if key in (own[words[0]] if key.startswith("algorithm.") else differ):
                words.append(f"{key.split('.')[-1]} {written(value)}")
        names.append(", ".join(words))
    return names


def _algorithm(flat: Mapping[str, Any]) -> str:
    return str(flat.get("algorithm", "fedavg"))


def differing(many: Sequence[Mapping[str, Any]]) -> list[str]:
    """The settings in which experiments differ."""
    keys = dict.fromkeys(key for flat in many for key in flat)
    return [key for key in keys if len({written(flat.get(key)) for flat in many}) > 1]


def written(value: Any) -> str:
    """A setting as text, as it is written in a table."""
    if value is None:
        return NONE
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def curve(one: Group, metric: str, style: Style = "solid") -> Line:
    """A metric by round: of the single run, or the mean over repeats with a band of ± one std.

    The mean has the rounds that all repeats recorded.
    """
    curves = [dict(zip(*run.curve(metric), strict=True)) for run in one.runs if run.has(metric)]
    if not curves:
        return Line(one.name, [], [], style=style)
    if len(curves) == 1:
        return Line(one.name, list(curves[0]), list(curves[0].values()), style=style)
    rounds = sorted(set.intersection(*map(set, curves)))
    means, lows, highs = [], [], []
    for round in rounds:
        values = [one[round] for one in curves]
        mean = fmean(values) if all(map(math.isfinite, values)) else math.nan
        spread = stdev(values) if math.isfinite(mean) else math.nan
        means.append(mean)
        lows.append(mean - spread)
        highs.append(mean + spread)
    return Line(one.name, rounds, means, lows, highs, style)


def off_if_many(lines: Sequence[Line]) -> list[Line]:
    """The lines; those after the first `MANY` names are hidden until a click on their name."""
    names = list(dict.fromkeys(line.name for line in lines))
    return [replace(line, off=names.index(line.name) >= MANY) for line in lines]


def mean_and_std(values: Sequence[float], percent: bool = False) -> str:
    """The mean as text, followed by ± the sample standard deviation if there are several values."""
    if not values:
        return NONE
    mean = format_number(fmean(values), percent)
    return f"{mean} ± {format_number(stdev(values), percent)}" if len(values) > 1 else mean


def best_round(one: Group, metric: str) -> tuple[float, float] | None:
    """The best point of a group's curve: its round and value."""
    if len(one.runs) == 1:
        single = one.runs[0].best(metric)
        return None if single is None else (single[1], single[0])
    line = curve(one, metric)
    points = [(y, round) for round, y in zip(line.x, line.y, strict=True) if is_number(y)]
    best = measures.best(metric, points)
    return None if best is None else (best[1], best[0])


def _without_seeds(run: Run) -> dict[str, Any]:
    return {key: value for key, value in settings(run.experiment).items() if key not in SEEDS}


def means(runs: Sequence[Run]) -> tuple[list[str], list[list[str]], list[str]] | None:
    """A table of mean accuracies over seeds, sorted: header, rows, and the best in words.

    With several data sets, there is one best for each data set with several experiments, since
    accuracies on different images cannot be compared. None if fewer than two have an accuracy.
    """
    metric = f"{primary_part(runs)}_accuracy"
    scored = [(fmean(values), one) for one in group(runs) if (values := one.finals(metric))]
    scored.sort(key=lambda pair: -pair[0])
    if len(scored) < 2:
        return None
    body = [
        [one.name, mean_and_std(one.finals(metric), percent=True), str(len(one.finals(metric)))]
        for _, one in scored
    ]
    what = f"{PART_NAMES[primary_part(runs)]} accuracy"
    by_data: dict[str, list[tuple[Group, list[str]]]] = {}
    for (_, one), row in zip(scored, body, strict=True):
        by_data.setdefault(_data_of(one), []).append((one, row))
    best = []
    for alike in by_data.values():
        sound = [each for each in alike if each[0].is_sound]
        if not sound:
            continue
        one, (name, reached, seeds) = sound[0]
        over = f" over {seeds} seeds" if seeds != "1" else ""
        where = f" on {written(one.settings.get('dataset'))}" if len(by_data) > 1 else ""
        if len(alike) > 1:
            best.append(f"{name}, {reached} {what}{where}{over}")
    return ["experiment", f"final {what}", "seeds"], body, best


def _data_of(one: Group) -> str:
    """An identifier of the images that a group was evaluated on."""
    digest = one.runs[0].manifest.get("test_data")
    return digest if isinstance(digest, str) else written(one.settings.get("dataset"))
