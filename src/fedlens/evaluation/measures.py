"""The measures of a run: their names in rounds.jsonl and summary.json, and which way is better.

Nothing in this module needs torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

X = TypeVar("X", int, float)

PARTS = ("test", "validation", "train")
"""What a model is evaluated on. Runs are compared by the first of these that they have."""

OF_PART = ("loss", "accuracy", "top5", "precision", "recall", "f1", "classes_predicted")
"""What `metrics.metrics` measures on a part; `measure_name` gives the names for that part."""

CHOSEN = ("balanced_accuracy", "kappa", "auroc", "average_precision", "ece")
"""What a part is measured by if it is chosen. User-defined metrics have no best value."""

OVER_CLIENTS = ("mean", "std", "min", "p10", "median", "max", "worst_decile", "jain", "weighted")
"""Statistics of clients' accuracies by `metrics.spread`, recorded as `client_accuracy_...`."""


OF_OWN_MODELS = (
    *("personal_accuracy", "personal_accuracy_p10", "personal_accuracy_std"),
    *("better_than_alone", "unseen_accuracy"),
)
"""Of the models that clients keep, at the end of a run."""


def measure_name(part: str, measure: str) -> str:
    """The name of a measure on a part. `train_loss` is taken: it is the loss of local training."""
    return "train_set_loss" if (part, measure) == ("train", "loss") else f"{part}_{measure}"


SUCCESS = "backdoor_success"
"""The share of patterned test images, or of those of a class, that get the label an attack wants"""

OF_MODEL = dict.fromkeys(
    [
        *(measure_name(part, name) for part in PARTS for name in OF_PART),
        "relative_accuracy",
        SUCCESS,
        *(f"client_accuracy_{name}" for name in OVER_CLIENTS),
    ]
)
"""What an evaluation can add to a record."""

NEITHER = {"clipped_share", *(measure_name(part, "classes_predicted") for part in PARTS)}
LOWER = {
    SUCCESS,
    *(measure_name(part, name) for part in PARTS for name in ("loss", "ece")),
    *("train_loss", "client_accuracy_std", "primal_residual", "dual_residual", "inexactness"),
    "personal_accuracy_std",
}
HIGHER = OF_MODEL.keys() | {measure_name(part, name) for part in PARTS for name in CHOSEN}
HIGHER |= {*OF_OWN_MODELS}
HIGHER -= LOWER | NEITHER
"""Which measures are the better the lower or the higher they are, and for which neither is so.

Others that an algorithm or a user measures have no best value.
"""

SHARES = (HIGHER & OF_MODEL.keys() | {"client_accuracy_std", SUCCESS}) - {"relative_accuracy"}
SHARES |= {*OF_OWN_MODELS}
"""Measures that are never below 0 or above 1."""


def best(measure: str, values: Iterable[tuple[float, X]]) -> tuple[float, X] | None:
    """The best of (value, round), the first of equals; None if no direction is better."""
    if measure not in LOWER | HIGHER:
        return None
    choose = min if measure in LOWER else max
    return choose(values, key=lambda pair: pair[0], default=None)
