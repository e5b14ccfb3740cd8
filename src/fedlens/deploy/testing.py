"""Tests a model on other data: a folder or a csv file of images with their classes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedlens.config.options import Named, did_you_mean
from fedlens.data.csv_files import listed_in
from fedlens.data.folders import class_layout, laid_out
from fedlens.data.pictures import TEST_SHARE, Found, Undecodable, refuse
from fedlens.deploy.classifier import Classifier
from fedlens.evaluation.intervals import wilson
from fedlens.evaluation.metrics import Tally, metrics
from fedlens.runs.manifest import demand_there
from fedlens.storage.reading import digest_of, expanded
from fedlens.storage.run_files import read_experiment


def tested_on(
    classifier: Classifier,
    place: Path,
    trained_on: Sequence[Path] = (),
    watch: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """The measures of the model on the data at `place`, ready for JSON.

    If the data say which images are for tests, only these are used; else all of them. Images with
    the content of a file in `trained_on` are also counted separately. `watch` is a callback with
    the number of images that are done, and their total.
    """
    found = _found(place, classifier.classes)
    found = found.of("test") if "test" in found.parts else found
    number = {name: label for label, name in enumerate(classifier.classes)}
    for name in found.classes:
        if name not in number:
            hint = did_you_mean(name, classifier.classes)
            raise ValueError(
                f"{place} has the class {name!r}, which the model does not have: {hint}"
            )
    labels = torch.tensor([number[found.classes[label]] for label in found.labels])
    paths = found.files
    broken: list[Undecodable] = []
    images = classifier.preprocessing.read_all(paths, broken, watch)
    batches = [logits for *_, logits in classifier.logits(images)]
    refuse(broken)  # it names all of them
    logits = torch.cat(batches)
    tally = Tally.of(logits, labels, len(number))
    correct = logits.argmax(1) == labels
    about: dict[str, Any] = {"data": str(place), **_share(correct), **metrics(tally)}
    seen = torch.tensor(_in_both(paths, trained_on))
    if seen.any():
        about |= {"trained_on": _share(correct[seen]), "new": _share(correct[~seen])}
    about["by_class"] = {name: _share(correct[labels == k]) for name, k in number.items()}
    if found.clients is not None:
        whose = found.columns[found.clients]
        about["by_client"] = {
            str(name): _share(correct[torch.from_numpy(whose == name)]) for name in np.unique(whose)
        }
    return about


def copies_in_test(run: Path, num_tested: int) -> int | None:
    """How many of a run's test images are copies of training images, if sites share files, say.

    None if that is unknown: the run had no image files, or there are not `num_tested` any more.
    """
    try:
        found = _divided(run)
        train, test = found.of("train").files, found.of("test").files
        return sum(_in_both(test, train)) if len(test) == num_tested else None
    except (ValueError, OSError):
        return None


def training_files(run: Path) -> list[Path]:
    """The image files that a run trained on. If they are unknown, a ValueError says why."""
    return _divided(run).of("train").files


def _divided(run: Path) -> Found:
    """The image files of a run, with those that it was tested on."""
    given = Named.of(read_experiment(run).get("dataset"), "dataset")
    if given.name not in ("csv", "folder"):
        raise ValueError(f"it was given {given.name}, and no image files")
    place, options = run / expanded(str(given.options.get("path"))), given.options
    demand_there(place, "dataset.path", run)
    if given.name == "csv":
        found = listed_in(place, options.get("client"))
    else:
        found = laid_out(place, options.get("layout"))
    return found.divided(options.get("test_share", TEST_SHARE))


def _in_both(paths: Sequence[Path], others: Sequence[Path]) -> list[bool]:
    """For each file, whether one of the others has the same content."""
    sizes = {path.stat().st_size for path in paths}
    same_size = [path for path in others if path.is_file() and path.stat().st_size in sizes]
    known = set(map(digest_of, same_size))
    return [bool(known) and digest_of(path) in known for path in paths]


def _share(correct: Tensor) -> dict[str, Any]:  # [n] bool
    count = len(correct)
    share = float(correct.double().mean()) if count else None
    return {"images": count, "accuracy": share, "interval": list(wilson(share or 0.0, count))}


def _found(place: Path, classes: Sequence[str]) -> Found:
    if place.is_dir():
        return laid_out(place, class_layout(place, classes))
    if place.suffix == ".csv" and place.is_file():
        return listed_in(place)
    raise ValueError(f"{place} is not a folder or csv file of images: name one that exists")
