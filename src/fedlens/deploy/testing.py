"""How good a model is on other data: a folder or a csv file of images with their classes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedlens.data.csv_files import listed_in
from fedlens.data.folders import class_layout, laid_out
from fedlens.data.pictures import Found, Listed
from fedlens.deploy.classifier import BATCH, Classifier
from fedlens.options import did_you_mean
from fedlens.runs.intervals import wilson
from fedlens.runs.metrics import Tally, metrics


def tested_on(classifier: Classifier, place: Path) -> dict[str, Any]:
    """What `place` says of the model, ready for JSON.

    Where the data say which images are for tests, it is these; else all of them.
    """
    found = _found(place, classifier.classes)
    listed = found.train if found.test is None else found.test
    number = {name: label for label, name in enumerate(classifier.classes)}
    for name in found.classes:
        if name not in number:
            hint = did_you_mean(name, classifier.classes)
            raise ValueError(f"{place} has the class {name!r}, which the model has not: {hint}")
    labels = torch.tensor([number[found.classes[label]] for label in listed.labels])
    logits = _logits(classifier, listed)
    tally = Tally.of(logits, labels, len(number))
    correct = logits.argmax(1) == labels
    about: dict[str, Any] = {"data": str(place), **_share(correct), **metrics(tally)}
    about["by_class"] = {name: _share(correct[labels == k]) for name, k in number.items()}
    if found.clients is not None:
        sites = listed.columns[found.clients].tolist()
        about["by_client"] = {
            name: _share(correct[[one == name for one in sites]]) for name in sorted(set(sites))
        }
    return about


def _share(correct: Tensor) -> dict[str, Any]:  # [n] bool
    count = len(correct)
    share = float(correct.double().mean()) if count else None
    return {"images": count, "accuracy": share, "interval": list(wilson(share or 0.0, count))}


def _found(place: Path, classes: Sequence[str]) -> Found:
    if place.is_dir():
        return laid_out(place, class_layout(place, classes))
    if place.suffix == ".csv":
        return listed_in(place)
    raise ValueError(f"{place} is no folder and no csv file of images: name one that is there")


@torch.no_grad()
def _logits(classifier: Classifier, listed: Listed) -> Tensor:  # [N, L]
    paths = [listed.base / name for name in listed.names]
    batches = [paths[start : start + BATCH] for start in range(0, len(paths), BATCH)]
    read = classifier.preprocessing.read
    return torch.cat([classifier(torch.stack([*map(read, some)])) for some in batches])
