"""Groups of repeats: runs that differ in nothing but their seeds, their data, and joint results."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from fedlens.evaluation import measures
from fedlens.report.blocks import Heat, Line, Style
from fedlens.report.numbers import NONE, format_number
from fedlens.runs.records import PART_NAMES, Run, is_number, primary_part, settings, told_apart

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
        together.setdefault(json.dumps(without_seeds(run), default=str), []).append(run)
    groups: dict[str, list[Run]] = {}
    for key, members in together.items():
        if len({seed_of(run) for run in members}) == len(members):
            groups[key] = members
        else:
            groups |= {f"{key} {i}": [run] for i, run in enumerate(members)}
    names = names_by_difference([without_seeds(members[0]) for members in groups.values()])
    return [
        Group(
            members[0].name if len(members) == 1 else name,
            tuple(members),
            without_seeds(members[0]),
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


MOST = 5  # data sets that a sentence names at most


def data_names(runs: Sequence[Run]) -> list[str]:
    """The name of each run's data set: its name and path, and the options that differ."""
    sets = [_name_and_path(run) for run in runs]
    paths = list(dict.fromkeys(path for _, path in sets if path))
    short = dict(zip(paths, told_apart([Path(path) for path in paths]), strict=True))
    alike: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for run, one in zip(runs, sets, strict=True):
        flat = settings(run.experiment)
        own = {key: value for key, value in flat.items() if key.startswith("dataset.")}
        alike.setdefault(one, []).append(own)
    differ = {one: differing(many) for one, many in alike.items()}
    options = {one: iter(many) for one, many in alike.items()}
    names = []
    for name, path in sets:
        own = next(options[name, path])
        words = [f"{k.removeprefix('dataset.')} {written(own.get(k))}" for k in differ[name, path]]
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
    yield Heat(
        title=f"Final {PART_NAMES[part]} accuracy by {_short(down)} and {_short(across)}",
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
    found = differing(many)
    return [k for k in found if not any(_goes_with(k, name, many) for name in found)]


def _goes_with(key: str, name: str, many: Sequence[Mapping[str, Any]]) -> bool:
    """Whether `key` is an option of `name` and has one value for each value of `name`."""
    if not key.startswith(f"{name}."):
        return False
    by_name: dict[str, list[Mapping[str, Any]]] = {}
    for flat in many:
        by_name.setdefault(written(flat.get(name)), []).append(flat)
    return not any(key in differing(alike) for alike in by_name.values())


def _values(groups: Sequence[Group], key: str) -> list[str]:
    """The values of a setting as text: numbers sorted, others in the given order."""
    values = {written(value): value for one in groups for value in [one.settings.get(key)]}
    numbers = {name: float(value) for name, value in values.items() if is_number(value)}
    return sorted(numbers, key=numbers.__getitem__) if len(numbers) == len(values) else [*values]


def _short(key: str) -> str:
    return key.split(".")[-1]
