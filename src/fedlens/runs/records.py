"""A run read from its folder, and the numbers that reports need of it.

How good it is at a budget of batches counts those of the client with the most in each round, summed
over rounds: clients train in parallel, so that client determines how long a round lasts (Hsu et al.
2020).
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeGuard

from fedlens.evaluation import measures
from fedlens.evaluation.measures import PARTS, measure_name
from fedlens.storage import run_files
from fedlens.storage.reading import printable

Record = dict[str, Any]
"""One line of rounds.jsonl: what a round did and, if evaluated, the measures of the model."""

Records = Sequence[Mapping[str, Any]]
"""The records of a run in order, one per round, as in `Result.records` and rounds.jsonl."""

PART_NAMES = {"test": "test", "validation": "validation", "train": "training"}
"""The parts of the data, by their names in texts."""


Curve = tuple[list[int], list[float]]
"""The rounds in which something was recorded, and its values."""


@dataclass(frozen=True)
class Run:
    """The content of a run folder. A number that was not recorded, or is not finite, is None."""

    name: str
    folder: Path
    experiment: dict[str, Any]
    toml: str  # the same, as text
    manifest: dict[str, Any]
    rounds: list[dict[str, Any]]
    summary: dict[str, Any]
    partition: dict[str, Any] | None
    # Details of the final model, and of models that clients trained alone.
    evaluation: dict[str, Any] = field(default_factory=dict)
    _curves: dict[str, Curve] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def algorithm(self) -> str:
        return str(settings(self.experiment)["algorithm"])

    @property
    def status(self) -> str:
        """One of `run_files.OVER`, or failed, interrupted or running."""
        return str(self.summary.get("status") or "interrupted")

    @property
    def num_rounds(self) -> int:
        return max((row["round"] for row in self.rounds), default=0)

    def curve(self, metric: str) -> Curve:
        """The rounds in which a metric was recorded, and its values; NaN where not finite."""
        if metric not in self._curves:  # a page asks for it often, and a run may be long
            points = [(row["round"], row[metric]) for row in self.rounds if metric in row]
            values = [math.nan if (y := number(value)) is None else y for _, value in points]
            self._curves[metric] = [round for round, _ in points], values
        return self._curves[metric]

    def has(self, metric: str) -> bool:
        return any(math.isfinite(value) for value in self.curve(metric)[1])

    def final(self, metric: str) -> float | None:
        """The final value in the summary, else the last value recorded."""
        final = table_in(self.summary, "final")
        if metric in final:
            return number(final[metric])
        values = self.curve(metric)[1]
        return number(values[-1]) if values else None

    @property
    def is_personal(self) -> bool:
        """Whether clients' own models were measured at the end."""
        return self.final("personal_accuracy") is not None

    def best(self, metric: str) -> tuple[float, int] | None:
        """The best value and its round, the first of equals."""
        saved = table_in(table_in(self.summary, "best"), metric)
        value, at = number(saved.get("value")), saved.get("round")
        if value is not None and isinstance(at, int):
            return value, at
        points = zip(*self.curve(metric), strict=True)
        return measures.best(metric, [(y, x) for x, y in points if math.isfinite(y)])

    def total(self, column: str) -> float | None:
        """The total of all rounds: seconds, bytes_up or bytes_down."""
        saved = self.summary.get(column)
        total = number(saved.get("total") if isinstance(saved, dict) else saved)
        if total is not None:
            return total
        columns = ("seconds", "evaluation_seconds") if column == "seconds" else (column,)
        values = [number(row.get(name)) for row in self.rounds for name in columns]
        spent = [value for value in values if value is not None]
        return sum(spent) if spent else None


def spent(summary: Mapping[str, Any]) -> float | None:
    """The seconds of training and evaluation in a summary; None if it has none."""
    seconds = table_in(summary, "seconds")
    both = [number(seconds.get(name)) for name in ("training", "evaluation")]
    return None if None in both else sum(filter(None, both))


def read(folder: Path) -> Run:
    """Read the run in `folder`."""
    folder = Path(folder)
    run_files.check_run(folder, [run_files.EXPERIMENT, run_files.MANIFEST, run_files.ROUNDS])
    experiment, rounds = run_files.read_experiment(folder), run_files.read_records(folder)
    summary = summary_of(folder, len(rounds))
    is_last = summary["status"] in run_files.OVER or experiment.get("rounds") == len(rounds)
    return Run(
        name=printable(folder.resolve().name),
        folder=folder,
        experiment=experiment,
        toml=run_files.experiment_text(folder).strip(),
        manifest=run_files.read_manifest(folder),
        rounds=rounds,
        summary=summary,
        partition=run_files.read_json(folder / run_files.PARTITION),
        evaluation=_final(folder) if is_last else {},
    )


def summary_of(folder: Path, num_rounds: int) -> dict[str, Any]:
    """The entries of a run's summary that are valid after this many rounds, with its status."""
    summary = run_files.read_summary(folder)
    summary = summary | {"status": run_files.status_of(folder, summary)}
    if summary.get("rounds") not in (None, num_rounds):  # killed: its summary is from the start
        summary = {key: summary[key] for key in ("status", "emd", "twin") if key in summary}
    return summary


def _final(folder: Path) -> dict[str, Any]:
    """The details of the final model, valid only if the run did not continue since."""
    return (run_files.read_json(folder / run_files.EVALUATION) or {}) | (
        run_files.read_json(folder / run_files.CLIENTS) or {}
    )


def read_all(folders: Sequence[Path]) -> list[Run]:
    """The runs of one report, with distinct names. A folder given twice is read once."""
    distinct = {Path(folder).resolve(): Path(folder) for folder in folders}
    if not distinct:
        raise ValueError("no run to report on: name at least one run folder")
    runs = [read(folder) for folder in distinct.values()]
    names = told_apart([*distinct])
    return [replace(run, name=name) for run, name in zip(runs, names, strict=True)]


def told_apart(paths: Sequence[Path]) -> list[str]:
    """A distinct name for each path: its last part, or as many as distinguish it from others."""
    names = [printable(path.name) for path in paths]
    for depth in range(2, max((len(path.parts) for path in paths), default=0) + 1):
        seen = Counter(names)
        names = [
            printable("/".join(path.parts[-depth:]).replace("//", "/")) if seen[name] > 1 else name
            for name, path in zip(names, paths, strict=True)
        ]
    return names


def is_number(value: Any) -> TypeGuard[float]:
    """Whether `value` is a finite number in the range of a float, and no bool."""
    largest = sys.float_info.max
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and -largest <= value <= largest
    )


def number(value: Any) -> float | None:
    """`value` if it is a finite number, else None."""
    return float(value) if is_number(value) else None


def primary_part(runs: Sequence[Run]) -> str:
    """The part by which runs are compared: test, else validation, else train."""
    return next((part for part in PARTS if evaluated_on(runs, part)), PARTS[-1])


def evaluated_on(runs: Sequence[Run], part: str) -> bool:
    """Whether any of the runs was evaluated on the part."""
    names = [measure_name(part, measure) for measure in ("accuracy", "loss")]
    return any(run.has(name) or run.final(name) is not None for run in runs for name in names)


AT_CLIENTS = "client_accuracy_weighted"  # of all examples that clients hold out


def tested_at_clients(runs: Sequence[Run]) -> bool:
    """Whether models were tested at the clients alone, which have all images."""
    return any(run.has(AT_CLIENTS) for run in runs) and not any(
        run.has(measure_name(part, "accuracy")) for run in runs for part in PARTS
    )


def recorded_as(runs: Sequence[Run], part: str, measure: str) -> str:
    """The name of a measure on a part in the records of runs.

    If no run was evaluated on the training examples, their loss is that of local training.
    """
    name = measure_name(part, measure)
    known = any(run.has(name) or run.final(name) is not None for run in runs)
    return name if known else f"{part}_{measure}"


def settings(experiment: Mapping[str, Any]) -> dict[str, Any]:
    """An experiment as a flat dict of dotted keys, spelled as on the command line."""
    flat: dict[str, Any] = {}

    def visit(key: str, value: Any) -> None:
        if isinstance(value, dict):
            for name, inner in value.items():
                visit(key if key and name == "name" else f"{key}.{name}".lstrip("."), inner)
        elif isinstance(value, list) and value and all(isinstance(v, dict) for v in value):
            names = [str(inner.get("name", i)) for i, inner in enumerate(value, 1)]
            flat[key] = " + ".join(names)
            for name, inner in zip(names, value, strict=True):
                visit(f"{key}.{name}", {k: v for k, v in inner.items() if k != "name"})
        else:
            flat[key] = value

    visit("", {**experiment, "algorithm": experiment.get("algorithm") or "fedavg"})
    return flat


def table_in(holder: Mapping[str, Any] | None, key: str) -> dict[str, Any]:
    """The table there; empty if there is none. Files may hold anything."""
    inner = (holder or {}).get(key)
    return inner if isinstance(inner, dict) else {}


def list_in(holder: Mapping[str, Any] | None, key: str) -> list[Any]:
    """The list there; empty if there is none."""
    inner = (holder or {}).get(key)
    return inner if isinstance(inner, list) else []


def interval_in(holder: Mapping[str, Any], key: str) -> tuple[float, float] | None:
    """The ends of the interval there, if it is one."""
    ends = list_in(holder, key)
    return (ends[0], ends[1]) if len(ends) == 2 and all(map(is_number, ends)) else None


def first_with(records: Records, target: float, key: str) -> Mapping[str, Any]:
    """The first record in which a measure was at least `target`; empty if there is none."""
    return next((r for r in records if is_number(r.get(key)) and r[key] >= target), {})


def rounds_to(records: Records, target: float, key: str = "test_accuracy") -> int | None:
    """The round of that record, or None."""
    return first_with(records, target, key).get("round")


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


CHOSEN_BY = measure_name("validation", "accuracy")
"""The measure that selects the best model: never on test examples, which are for testing it."""


def merit(record: Mapping[str, Any]) -> tuple[float, float] | None:
    """How good a model is on validation, the greater the better; None if that was not measured.

    Few images have few accuracies: of models that are equally accurate, a lower loss is better.
    """
    accuracy = record.get(CHOSEN_BY)
    loss = record.get(measure_name("validation", "loss"))
    if not is_number(accuracy):
        return None
    return accuracy, -loss if is_number(loss) else -math.inf
