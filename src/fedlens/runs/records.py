"""What a run left in its folder, and the numbers that people ask of it."""

from __future__ import annotations

import json
import math
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeGuard

SPOKEN = {"test": "test", "validation": "validation", "train": "training"}
"""The parts of the data as they are called in a sentence."""


@dataclass(frozen=True)
class Run:
    """One run folder, read. A number that was never recorded, or is not finite, is None."""

    name: str
    folder: Path
    experiment: dict[str, Any]
    manifest: dict[str, Any]
    rounds: list[dict[str, Any]]
    summary: dict[str, Any]
    partition: dict[str, Any] | None
    evaluation: dict[str, Any] = field(default_factory=dict)  # of the final model, in detail

    @property
    def algorithm(self) -> str:
        return str(settings(self.experiment)["algorithm"])

    @property
    def status(self) -> str:
        """finished, interrupted, diverged or running. A killed run could not say; we do."""
        return str(self.summary.get("status") or "interrupted")

    @property
    def num_rounds(self) -> int:
        return max((row["round"] for row in self.rounds), default=0)

    def curve(self, metric: str) -> tuple[list[int], list[float]]:
        """The rounds in which a metric was recorded, and its values; NaN where not finite."""
        points = [(row["round"], row[metric]) for row in self.rounds if metric in row]
        values = [math.nan if (y := number(value)) is None else y for _, value in points]
        return [round for round, _ in points], values

    def has(self, metric: str) -> bool:
        return any(math.isfinite(value) for value in self.curve(metric)[1])

    def final(self, metric: str) -> float | None:
        """The summary's word, else the last value recorded."""
        final = _table(self.summary, "final")
        if metric in final:
            return number(final[metric])
        values = self.curve(metric)[1]
        return number(values[-1]) if values else None

    def best(self, metric: str) -> tuple[float, int] | None:
        """The best value and its round: the lowest loss, the highest of anything else."""
        best = _table(_table(self.summary, "best"), metric)
        value, at = number(best.get("value")), best.get("round")
        if value is not None and isinstance(at, int):
            return value, at
        points = [(v, r) for r, v in zip(*self.curve(metric), strict=True) if math.isfinite(v)]
        sign = -1 if metric.endswith("loss") else 1
        return max(points, key=lambda point: (sign * point[0], -point[1]), default=None)

    def total(self, column: str) -> float | None:
        """What all rounds took together: seconds, bytes_up or bytes_down."""
        told = self.summary.get(column)
        told = number(told.get("total") if isinstance(told, dict) else told)
        if told is not None:
            return told
        parts = ("seconds", "evaluation_seconds") if column == "seconds" else (column,)
        told_by_rounds = [number(row.get(part)) for row in self.rounds for part in parts]
        spent = [y for y in told_by_rounds if y is not None]
        return sum(spent) if spent else None


def read(folder: Path) -> Run:
    """The run that `folder` holds. A last line that a killed run left torn is passed over."""
    folder = Path(folder)
    needed = ("experiment.toml", "manifest.json", "rounds.jsonl")
    missing = [name for name in needed if not (folder / name).is_file()]
    if missing:
        raise ValueError(f"{folder} is not a run folder: {_remedy(folder, missing)}")
    try:
        experiment = tomllib.loads((folder / "experiment.toml").read_text("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{folder / 'experiment.toml'} cannot be read: {error}; run the experiment again"
        ) from None
    rounds = _rounds(folder / "rounds.jsonl")
    summary = _json(folder / "summary.json") or {}
    if summary.get("rounds") not in (None, len(rounds)):  # killed: what it was when it started
        summary = {key: summary[key] for key in ("status", "emd", "twin") if key in summary}
    return Run(
        name=_printable(folder.resolve().name),
        folder=folder,
        experiment=experiment,
        manifest=_json(folder / "manifest.json") or {},
        rounds=rounds,
        summary=summary,
        partition=_json(folder / "partition.json"),
        evaluation=_json(folder / "evaluation.json") or {},
    )


def read_all(folders: Sequence[Path]) -> list[Run]:
    """The runs of one report, each under a name of its own. A folder named twice is read once."""
    distinct = {Path(folder).resolve(): Path(folder) for folder in folders}
    if not distinct:
        raise ValueError("no run to report on: name at least one run folder")
    runs = [read(folder) for folder in distinct.values()]
    parts = [path.parts for path in distinct]
    names = [run.name for run in runs]
    for depth in range(2, max(map(len, parts)) + 1):
        seen = Counter(names)
        names = [
            _printable("/".join(part[-depth:]).replace("//", "/")) if seen[name] > 1 else name
            for name, part in zip(names, parts, strict=True)
        ]
    return [replace(run, name=name) for run, name in zip(runs, names, strict=True)]


def is_number(value: Any) -> TypeGuard[float]:
    """Whether it is a finite number; a truth value is none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def number(value: Any) -> float | None:
    """`value` if it is a finite number."""
    return float(value) if is_number(value) else None


def part(runs: Sequence[Run]) -> str:
    """The examples that the runs are judged on: test, else validation, else train."""
    for name in ("test", "validation"):
        metrics = (f"{name}_accuracy", f"{name}_loss")
        if any(run.has(m) or run.final(m) is not None for run in runs for m in metrics):
            return name
    return "train"


def settings(experiment: Mapping[str, Any]) -> dict[str, Any]:
    """An experiment as dotted keys, spelled as they are on the command line."""
    flat: dict[str, Any] = {}

    def visit(key: str, value: Any) -> None:
        if isinstance(value, dict):
            for name, inner in value.items():
                visit(key if key and name == "name" else f"{key}.{name}".lstrip("."), inner)
        elif isinstance(value, list) and value and all(isinstance(v, dict) for v in value):
            names = [str(inner.get("name", place)) for place, inner in enumerate(value, 1)]
            flat[key] = " + ".join(names)
            for name, inner in zip(names, value, strict=True):
                visit(f"{key}.{name}", {k: v for k, v in inner.items() if k != "name"})
        else:
            flat[key] = value

    visit("", {**experiment, "algorithm": experiment.get("algorithm") or "fedavg"})
    return flat


def _rounds(path: Path) -> list[dict[str, Any]]:
    lines = path.read_text("utf-8", errors="replace").splitlines()
    rounds: dict[int, dict[str, Any]] = {}
    for place, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            if not isinstance(row, dict) or type(row.get("round")) is not int:
                raise ValueError("it has no round number")
        except ValueError as error:
            if place == len(lines):
                break
            raise ValueError(
                f"{path}, line {place} cannot be read: {error}; delete the line or run again"
            ) from None
        rounds[row["round"]] = row
    return [rounds[round] for round in sorted(rounds)]


def _json(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} cannot be read: {error}; run the experiment again") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds no JSON object: run the experiment again")
    return content


def _table(holder: Mapping[str, Any], key: str) -> dict[str, Any]:
    inner = holder.get(key)
    return inner if isinstance(inner, dict) else {}


def _remedy(folder: Path, missing: Sequence[str]) -> str:
    if not folder.is_dir():
        return "there is no such folder; name one that `fedlens run` wrote"
    inside = sorted(path.parent.name for path in folder.glob("*/experiment.toml"))
    if inside:
        more = ", ..." if len(inside) > 3 else ""
        return f"the runs are inside it; name them one by one ({', '.join(inside[:3])}{more})"
    return f"it has no {' and no '.join(missing)}; name one that `fedlens run` wrote"


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in text)
