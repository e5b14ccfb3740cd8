"""The measures of a run: their names in rounds.jsonl and summary.json, and which way is better.

Nothing in this module needs torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, TypeVar

Better = Literal["higher", "lower"]
X = TypeVar("X", int, float)

PARTS = ("test", "validation", "train")
"""What a model is evaluated on. Runs are compared by the first of these that they have."""

OF_PART: dict[str, Better | None] = {
    "loss": "lower",
    "accuracy": "higher",
    "top5": "higher",
    "precision": "higher",
    "recall": "higher",
    "f1": "higher",
    "classes_predicted": None,
}
"""What `metrics.metrics` measures on a part; `measure_name` gives the names for that part."""

CHOSEN: dict[str, Better | None] = {
    "balanced_accuracy": "higher",
    "kappa": "higher",
    "auroc": "higher",
    "ece": "lower",
}
"""What `chosen_metrics` measures on a part, if chosen. User-defined metrics have no best value."""

OVER_CLIENTS: dict[str, Better | None] = {
    "mean": "higher",
    "std": "lower",
    "min": "higher",
    "p10": "higher",
    "median": "higher",
    "max": "higher",
    "worst_decile": "higher",
    "jain": "higher",
}
"""Statistics of clients' accuracies by `metrics.spread`, recorded as `client_accuracy_...`."""

OF_ALGORITHM: dict[str, Better | None] = {
    "primal_residual": "lower",
    "dual_residual": "lower",
    "inexactness": "lower",
    "clipped_share": None,
}
"""What algorithms measure in each round. A measure that is not listed here has no best value."""


def measure_name(part: str, measure: str) -> str:
    """The name of a measure on a part. `train_loss` is taken: it is the loss of local training."""
    return "train_set_loss" if (part, measure) == ("train", "loss") else f"{part}_{measure}"


OF_MODEL: dict[str, Better | None] = {
    **{measure_name(part, name): way for part in PARTS for name, way in OF_PART.items()},
    "relative_accuracy": "higher",
    **{f"client_accuracy_{name}": way for name, way in OVER_CLIENTS.items()},
}
"""What an evaluation can add to a record."""

SHARES = (
    OF_MODEL.keys()
    - {"relative_accuracy", "train_set_loss"}
    - {measure_name(part, name) for part in PARTS for name in ("loss", "classes_predicted")}
)
"""Measures that are never below 0 or above 1."""

BETTER: dict[str, Better | None] = {
    "train_loss": "lower",
    **OF_ALGORITHM,
    **OF_MODEL,
    **{measure_name(part, name): way for part in PARTS for name, way in CHOSEN.items()},
}


def best(measure: str, values: Iterable[tuple[float, X]]) -> tuple[float, X] | None:
    """The best of (value, round), the first of equals; None if no direction is better."""
    better = BETTER.get(measure)
    if better is None:
        return None
    choose = min if better == "lower" else max
    return choose(values, key=lambda pair: pair[0], default=None)
