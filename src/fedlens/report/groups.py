"""Groups of repeats: runs that differ in nothing but their seeds, their data, and joint results."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, TypeVar

from fedlens.evaluation import measures
from fedlens.report.blocks import Heat, Line, Style
from fedlens.report.numbers import NONE, format_number
from fedlens.runs.records import (
    PART_NAMES,
    Run,
    is_number,
    number,
    primary_part,
    settings,
    told_apart,
)

T = TypeVar("T")

SEEDS = ("seed", "clients.seed")
MANY = 8  # with more groups than this, pictures show the best ones
MOST = 5  # data sets that a sentence names at most


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
        together.setdefault(json.dumps(without_seeds(run), default=str), []).append(run)
    groups: dict[str, list[Run]] = {}
    for key, members in together.items():
        if len({seed_of(run) for run in members}) == len(members):
            groups[key] = members
        else:
            groups |= {f"{key} {i}": [run] for i, run in enumerate(members)}
    flat = [without_seeds(members[0]) for members in groups.values()]
    return [
        Group(members[0].name if len(members) == 1 else name, tuple(members), own)
        for name, members, own in zip(names_by_difference(flat), groups.values(), flat, strict=True)
    ]


def best_first(groups: Sequence[Group], metric: str) -> list[Group]:
    """The groups: if there are more than `MANY`, sorted by final value, else in the given order."""
    if len(groups) <= MANY:
        return list(groups)
    return sorted(groups, key=lambda one: -fmean(one.finals(metric) or [-1.0]))


def seed_of(run: Run) -> tuple[Any, ...]:
    """The seeds of a run, which distinguish it from its repeats."""
    flat = settings(run.experiment)
    return tuple(flat.get(key) for key in SEEDS)


def names_by_difference(many: Sequence[dict[str, Any]]) -> list[str]:
    """A name for each experiment: its algorithm, and the other settings that differ."""
    return in_words(many, dict.fromkeys(["algorithm", *differing(many)]))


def in_words(
    many: Sequence[Mapping[str, Any]],
    keys: Iterable[str],
    by_value: Container[str] = ("algorithm",),
    label: Callable[[str], str] = lambda key: key.split(".")[-1],
) -> list[str]:
    """These settings of each experiment in words; some are named by their value alone.

    Options of an algorithm are named only if experiments with that algorithm differ in them.
    """
    algorithms = [written(flat.get("algorithm")) for flat in many]
    own = {
        name: differing([flat for flat, of in zip(many, algorithms, strict=True) if of == name])
        for name in set(algorithms)
    }
    return [
        ", ".join(
            ("" if key in by_value else f"{label(key)} ") + written(flat[key])
            for key in keys
            if key in flat and (key in own[algorithm] or not key.startswith("algorithm."))
        )
        for flat, algorithm in zip(many, algorithms, strict=True)
    ]


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
    runs = [run for run in one.runs if run.has(metric)]
    shared = in_all([dict(zip(*run.curve(metric), strict=True)) for run in runs])
    if len(runs) < 2:
        return Line(one.name, list(shared), [value for (value,) in shared.values()], style=style)
    points = [around(values) for values in shared.values()]
    means, lows, highs = ([point[side] for point in points] for side in range(3))
    return Line(one.name, list(shared), means, lows, highs, style)


def by_cost(
    one: Group, metric: str, costs: Callable[[Run], Iterable[float | None]], unit: float = 1.0
) -> Line:
    """A metric against a number that each round has: means over repeats, in rounds of them all."""
    shared = in_all(
        [
            {
                row["round"]: (cost, value)
                for row, cost in zip(run.rounds, costs(run), strict=True)
                if cost is not None and (value := number(row.get(metric))) is not None
            }
            for run in one.runs
            if run.has(metric)
        ]
    )
    xs, ys = ([fmean(p[side] for p in points) for points in shared.values()] for side in (0, 1))
    return Line(one.name, [x / unit for x in xs], ys)


def around(values: Sequence[float]) -> tuple[float, float, float]:
    """The mean of values, and the ends of ± one standard deviation; NaN if some are not finite."""
    if not all(map(math.isfinite, values)):
        return math.nan, math.nan, math.nan
    mean, std = fmean(values), stdev(values)
    return mean, mean - std, mean + std


def in_all(curves: Sequence[Mapping[int, T]]) -> dict[int, list[T]]:
    """The values of each round that all curves have."""
    rounds = sorted(set.intersection(*map(set, curves))) if curves else []
    return {round: [curve[round] for curve in curves] for round in rounds}


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
    best: tuple[float, float] | None
    if len(one.runs) == 1:
        best = one.runs[0].best(metric)
    else:
        line = curve(one, metric)
        points = [(y, round) for round, y in zip(line.x, line.y, strict=True) if is_number(y)]
        best = measures.best(metric, points)
    return best and (best[1], best[0])


def without_seeds(run: Run) -> dict[str, Any]:
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
    body = []
    what = f"{PART_NAMES[primary_part(runs)]} accuracy"
    by_data: dict[str, list[tuple[Group, list[str]]]] = {}
    for _, one in scored:
        values = one.finals(metric)
        body.append([one.name, mean_and_std(values, percent=True), str(len(values))])
        images = one.runs[0].manifest.get("test_data") or one.settings.get("dataset")
        by_data.setdefault(written(images), []).append((one, body[-1]))
    best = []
    for alike in by_data.values():
        one, (name, reached, seeds) = next((each for each in alike if each[0].is_sound), alike[0])
        if len(alike) > 1 and one.is_sound:
            over = f" over {seeds} seeds" if seeds != "1" else ""
            where = f" on {written(one.settings.get('dataset'))}" if len(by_data) > 1 else ""
            best.append(f"{name}, {reached} {what}{where}{over}")
    return ["experiment", f"final {what}", "seeds"], body, best


def data_names(runs: Sequence[Run]) -> list[str]:
    """The name of each run's data set: its name and path, and the options that differ."""
    flat, sets = [settings(run.experiment) for run in runs], [_name_and_path(run) for run in runs]
    paths = list(dict.fromkeys(path for _, path in sets if path))
    short = dict(zip(paths, told_apart([Path(path) for path in paths]), strict=True))
    differ = {
        one: differing([own for own, of in zip(flat, sets, strict=True) if of == one])
        for one in set(sets)
    }
    names = []
    for own, (name, path) in zip(flat, sets, strict=True):
        keys = [key for key in differ[name, path] if key.startswith("dataset.")]
        words = [f"{key.removeprefix('dataset.')} {written(own.get(key))}" for key in keys]
        names.append(" ".join([name, *([short[path]] if path else []), *words]))
    return names


def different_data(runs: Sequence[Run]) -> str:
    """A warning if runs are on different data, since accuracies do not compare then; else empty."""
    sets, prints = {_name_and_path(run) for run in runs}, {run.manifest.get("data") for run in runs}
    moved = len(prints) == 1 and None not in prints  # the same images at several paths
    if len(sets) < 2 or moved:
        return ""
    names = list(dict.fromkeys(data_names(runs)))
    more = f" and {len(names) - MOST} more" if len(names) > MOST else ""
    named = ", ".join(names[:MOST]) + more
    return f"They are on different data ({named}): their accuracies do not say which is better"


def _name_and_path(run: Run) -> tuple[str, str]:
    flat = settings(run.experiment)
    path = flat.get("dataset.path")
    return written(flat.get("dataset", run.name)), path if isinstance(path, str) else ""


def grid_block(groups: Sequence[Group], part: str) -> Iterator[Heat]:
    """The matrix, if exactly two settings differ and more than half of its cells have a number.

    Accuracies are those of finished runs.
    """
    keys = _keys([one.settings for one in groups])
    if len(keys) != 2:
        return
    # The setting with more values has the columns, since there is more room across.
    down, across = sorted(keys, key=lambda key: len(_values(groups, key)))
    rows, columns = _values(groups, down), _values(groups, across)
    ends: dict[tuple[str, str], list[float]] = {}
    for one in groups:
        place = written(one.settings.get(down)), written(one.settings.get(across))
        final = [run.final(f"{part}_accuracy") for run in one.runs if run.status == "finished"]
        ends.setdefault(place, []).extend(filter(is_number, final))
    found = {place: fmean(values) for place, values in ends.items() if values}
    if len(rows) < 2 or 2 * len(found) <= len(rows) * len(columns):
        return
    runs = [run for one in groups for run in one.runs]
    told = different_data(runs)
    best = [] if told else [place for place in found if found[place] == max(found.values())]
    short = " and ".join(key.split(".")[-1] for key in (down, across))
    yield Heat(
        title=f"Final {PART_NAMES[part]} accuracy by {short}",
        name="accuracy_by_settings",
        caption=" ".join(_words(ends, len(runs), part, told)),
        values=[[found.get((row, column), math.nan) for column in columns] for row in rows],
        row_names=rows,
        column_names=columns,
        row_label=down,
        column_label=across,
        value_label=f"final {PART_NAMES[part]} accuracy",
        percent=True,
        digits=1,
        best=frozenset((rows.index(row), columns.index(column)) for row, column in best),
    )


def _words(
    ends: Mapping[tuple[str, str], Sequence[float]], num_runs: int, part: str, told: str
) -> Iterator[str]:
    """The sentences of the caption."""
    counts = {len(values) for values in ends.values() if values}
    over = ""
    if max(counts) > 1:
        number = f"{min(counts)} to {max(counts)}" if len(counts) > 1 else f"{max(counts)}"
        over = f", the mean over {number} runs"
    yield f"Accuracy on the {PART_NAMES[part]} examples at the end of each run, in percent{over}."
    yield f"{told}." if told else "The best is framed."
    missing = num_runs - sum(map(len, ends.values()))
    if missing:
        yield f"{missing} of {num_runs} runs did not finish, or were not evaluated: without them."


def _keys(many: Sequence[Mapping[str, Any]]) -> list[str]:
    """The settings that differ, without options that are determined by a name that differs."""

    def count(*names: str) -> int:
        return len({tuple(written(flat.get(name)) for name in names) for flat in many})

    def follows(key: str, name: str) -> bool:
        return key.startswith(f"{name}.") and count(name, key) == count(name)

    found = differing(many)
    return [key for key in found if not any(follows(key, name) for name in found)]


def _values(groups: Sequence[Group], key: str) -> list[str]:
    """The values of a setting as text: numbers sorted, others in the given order."""
    values = {written(value): value for value in (one.settings.get(key) for one in groups)}
    numbers = {name: float(value) for name, value in values.items() if is_number(value)}
    return sorted(numbers, key=numbers.__getitem__) if len(numbers) == len(values) else [*values]
