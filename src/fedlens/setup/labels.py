"""What has no meaning for images that may have several labels, or for those alone."""

from __future__ import annotations

from fedlens.config.experiment import Experiment
from fedlens.config.names import ATTACKS, LOSSES, METRICS
from fedlens.config.options import Named
from fedlens.core.federation import Dataset

LOSS = "binary_cross_entropy"
BY_CLASS = {
    "algorithm": ("fedir", "fedns", "fedproto", "lastfc"),
    "clients.partition": (
        *("classes", "dirichlet", "dirichlet-per-class", "drawn", "fresh", "noisy-labels"),
        *("published", "shards", "slices"),
    ),
    "attack": tuple(name for name in ATTACKS if ATTACKS.modules[name] == "data"),
    "evaluate.metrics": tuple(METRICS),
}
"""What counts on one class an image, by the key that names it."""


def check_labels(experiment: Experiment, dataset: Dataset) -> None:
    """Raise a ValueError if an experiment does not fit how many labels an image may have."""
    loss = experiment.loss.name
    if not dataset.multi_label:
        if loss == LOSS:
            raise ValueError(
                f'loss is "{loss}", and each image of {dataset.name} has one class: leave loss out '
                "or, if images may have several labels, see docs/several-labels.md"
            )
        return
    images = f"an image of {dataset.name} may have several labels"
    if loss in LOSSES and loss != LOSS:
        raise ValueError(
            f'loss is "{loss}", and {images}: set loss = "{LOSS}" (if each has one, as one-hot '
            "rows do, give labels.argmax(1))"
        )
    if experiment.outputs not in (None, dataset.num_classes):
        raise ValueError(f"outputs is {experiment.outputs}, and {images}: leave it out")
    if experiment.local.class_balance:
        remedy = "set positive_weight of the loss in its place"
        raise ValueError(f"local.class_balance counts classes, and {images}: {remedy}")
    partition, attack = experiment.clients.partition, experiment.attack
    inner = partition.options.get("of", "iid")
    chosen = {
        "algorithm": experiment.algorithm,
        "clients.partition": (partition, Named.of(inner, "clients.partition.of")),
        "attack": () if attack is None else (attack,),
        "evaluate.metrics": experiment.evaluate.metrics,
    }
    for key, named in chosen.items():
        for name in [one.name for one in named if one.name in BY_CLASS[key]]:
            raise ValueError(
                f'{key} is "{name}", which counts on one class an image, and {images}: choose '
                "another, or leave it out"
            )
