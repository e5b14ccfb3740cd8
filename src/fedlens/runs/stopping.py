"""Early stopping by the records of a run, and the choice of its best model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fedlens.config.experiment import Experiment
from fedlens.evaluation.measures import measure_name
from fedlens.runs.records import is_number

CHOSEN_BY = measure_name("validation", "accuracy")
"""The measure that selects the best model: never on test examples, which are for testing it."""


@dataclass
class Stopping:
    """Applies an experiment's stopping rules to records; the first that holds gives `reason`."""

    experiment: Experiment
    reason: str = ""  # for stopping, once a rule holds
    best: float | None = None
    best_round: int = 0
    num_since: int = 0  # evaluations since the best
    num_bytes: int = 0

    def spend(self, record: Mapping[str, Any], seconds: float) -> None:
        """Add the cost of a round; `seconds` is the time of the whole run so far."""
        stop = self.experiment.stop
        self.num_bytes += record["bytes_up"] + record["bytes_down"]
        if stop is None or self.reason:
            return
        spent = {
            "batches": (record["batches_total"], stop.batches),
            "bytes": (self.num_bytes, stop.bytes),
            "seconds": (seconds, stop.seconds),
        }
        for what, (amount, most) in spent.items():
            if most is not None and amount >= most:
                self.reason = f"stop.{what}: {_short(amount)} of {_short(most)} {what} are spent"
                return

    def judge(self, record: Mapping[str, Any]) -> bool:
        """Add a record's evaluation, if it has one; return whether its model is the best so far."""
        stop, accuracy = self.experiment.stop, record.get(CHOSEN_BY)
        is_best = is_number(accuracy) and (self.best is None or accuracy > self.best)
        if is_best:
            self.best, self.best_round, self.num_since = accuracy, record["round"], 0
        elif CHOSEN_BY in record:
            self.num_since += 1
        if stop is None or self.reason:
            return is_best
        part = "validation" if CHOSEN_BY in record else "test"
        reached = record.get(measure_name(part, "accuracy"))
        if stop.accuracy is not None and is_number(reached) and reached >= stop.accuracy:
            self.reason = f"stop.accuracy: the {part} accuracy is {reached:.4g}"
        elif stop.patience is not None and self.num_since >= stop.patience:
            count = "1 evaluation" if self.num_since == 1 else f"{self.num_since} evaluations"
            self.reason = (
                f"stop.patience: the validation accuracy was best in round {self.best_round}, "
                f"{count} ago"
            )
        return is_best


def _short(amount: float) -> str:
    return f"{amount:,.0f}" if amount >= 10 else f"{amount:.2g}"
