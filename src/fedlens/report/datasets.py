"""The data sets of runs: their names, and whether they are the same."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedlens.report.groups import differing, written
from fedlens.runs.records import Run, settings, told_apart

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
