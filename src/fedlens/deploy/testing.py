"""Tests a model on other data: a folder or a csv file of images with their classes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedlens.config.options import Named
from fedlens.core.label_sets import unpacked
from fedlens.data.arrays import renumbered
from fedlens.data.csv_files import listed_in
from fedlens.data.folders import class_layout, laid_out
from fedlens.data.pictures import PARTS, TEST_SHARE, Found, Undecodable, refuse
from fedlens.deploy.classifier import Classifier, image_files
from fedlens.deploy.drift import MOST, Seen, drift, features_of
from fedlens.evaluation.intervals import FEWEST, wilson
from fedlens.evaluation.metrics import Tally, from_logits, is_right, metrics, of_labels
from fedlens.runs.manifest import demand_there
from fedlens.storage.reading import digest_of, expanded
from fedlens.storage.run_files import read_experiment


class Files(NamedTuple):
    """The image files of a run: what it trained on, and what it was tested on."""

    train: Sequence[Path] = ()
    test: Sequence[Path] = ()


def tested_on(
    classifier: Classifier,
    place: Path,
    known: Files,
    watch: Callable[[int, int], None] | None = None,
    labelled: bool = True,
) -> dict[str, Any]:
    """The measures of the model on the data at `place`, ready for JSON.

    If the data say which images are for tests, only these are used; else all of them. Images with
    the content of a file that the run trained on are also counted separately, and the others are
    compared with the run's own, which is all that is said of images that are not `labelled`.
    `watch` is a callback with the number of images that are done, and their total.
    """
    found = _found(place, classifier) if labelled else _unlabelled(place)
    found = found.of("test") if "test" in found.parts else found
    several, classes = classifier.multi_label, classifier.classes
    labels = torch.tensor(found.labels)
    if labelled:
        labels = renumbered(labels, found.classes, classes, several, (place, "the model"))
        labels = unpacked(labels, len(classes)) if several else labels
    broken: list[Undecodable] = []
    seen, logits = _seen(classifier, found.files, broken, watch)
    refuse(broken)  # it names all of them
    whose = np.array([]) if found.clients is None else found.columns[found.clients]
    sites = {str(name): torch.from_numpy(whose == name) for name in np.unique(whose)}
    about: dict[str, Any] = {"data": str(place), "images": len(logits)}
    trained_on = torch.tensor(_in_both(found.files, known.train))
    if labelled:
        correct, tally = is_right(logits, labels), Tally.of(logits, labels, len(classes))
        values = from_logits([], logits, labels)
        about |= {**_share(correct), **metrics(tally)}
        about |= {name: float(value.nanmean()) for name, value in values.items()}
        if trained_on.any():
            about |= {
                "trained_on": _share(correct[trained_on]),
                "new": _share(correct[~trained_on]),
            }
        if several:
            about["by_label"] = of_labels(tally, values, classes)
        else:
            about["by_class"] = {
                name: _share(correct[labels == k]) for k, name in enumerate(classes)
            }
        if sites:
            about["by_client"] = {name: _share(correct[own]) for name, own in sites.items()}
    if len(known.test) >= FEWEST and not trained_on.all():
        new = Seen(*(each[~trained_on] for each in seen))
        own = {name: some[~trained_on] for name, some in sites.items()}
        of_run = [_some(files) for files in known]
        parts = [_seen(classifier, files, [], watch)[0] for files in of_run]
        about["drift"] = drift(new, parts[0].features, parts[1], own)
    return about


def _seen(
    classifier: Classifier,
    files: Sequence[Path],
    broken: list[Undecodable],
    watch: Callable[[int, int], None] | None,
) -> tuple[Seen, Tensor]:
    """What the model makes of image files, and its logits; those that are `broken` are added."""
    with features_of(classifier.module) as features:
        images = classifier.preprocessing.read_all(files, broken, watch)
        batches = [logits for *_, logits in classifier.logits(images)]
    if not batches:
        refuse(broken)
    logits = torch.cat(batches)
    return Seen(torch.cat(features), classifier.probabilities(logits).amax(1)), logits


def _some(files: Sequence[Path]) -> Sequence[Path]:
    """Some of the files that are there, from all over them."""
    there = [file for file in files if file.is_file()]
    return there[:: -(-len(there) // MOST) or 1]


def _unlabelled(place: Path) -> Found:
    """The images below a folder, whatever its folders are called; the outermost are sites."""
    files = image_files([place])
    names = [file.relative_to(place) for file in files] if place.is_dir() else []
    if not names:
        raise ValueError(f"{place} is not a folder of images: name one that exists")
    sites = np.array([name.parts[0] if len(name.parts) > 1 else "" for name in names])
    nothing, parts = [0] * len(names), [PARTS[0]] * len(names)
    whose = {"site": sites}
    return Found(place.name, place, [*map(str, names)], nothing, ["?"], parts, whose, "site")


def copies_in_test(run: Path, num_tested: int) -> int | None:
    """How many of a run's test images are copies of training images, if sites share files, say.

    None if that is unknown: the run had no image files, or there are not `num_tested` any more.
    """
    try:
        train, test = files_of(run)
        return sum(_in_both(test, train)) if len(test) == num_tested else None
    except (ValueError, OSError):
        return None


def files_of(run: Path) -> Files:
    """The image files of a run. If they are unknown, a ValueError says why."""
    found = _divided(run)
    return Files(found.of("train").files, found.of("test").files)


def _divided(run: Path) -> Found:
    """The image files of a run, with those that it was tested on."""
    given = Named.of(read_experiment(run).get("dataset"), "dataset")
    if given.name not in ("csv", "folder"):
        raise ValueError(f"it was given {given.name}, and no image files")
    place, options = run / expanded(str(given.options.get("path"))), given.options
    demand_there(place, "dataset.path", run)
    if given.name == "csv":
        found = listed_in(place, options.get("client"), options.get("multi_label", False))
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


def _found(place: Path, classifier: Classifier) -> Found:
    if place.suffix == ".csv" and place.is_file():
        return listed_in(place, multi_label=classifier.multi_label)
    if classifier.multi_label:
        raise ValueError(f"{place} is no csv file, which can say that images have several labels")
    if place.is_dir():
        return laid_out(place, class_layout(place, classifier.classes))
    raise ValueError(f"{place} is not a folder or csv file of images: name one that exists")
