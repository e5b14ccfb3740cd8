"""Data sets of Hugging Face's `datasets`, in the folders that `save_to_disk` writes."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fedlens.config.options import no_column
from fedlens.config.sections import Count, Share
from fedlens.core.federation import Dataset, Fit
from fedlens.data.arrays import Column, demand_labels
from fedlens.data.layouts import SPELLINGS, part_named, with_tests
from fedlens.data.pictures import MEGAPIXELS, TEST_SHARE, Form, Found, OnError, Part, dataset
from fedlens.data.places import Source
from fedlens.storage.reading import reading

REMEDY = "set path to a folder that save_to_disk of datasets made"


def hugging_face(
    source: Source,
    *,
    path: str,
    image: str | None = None,
    label: str | None = None,
    client: str | None = None,
    size: Count | None = None,
    fit: Fit = "stretch",
    channels: Literal[1, 3] | None = None,
    test_share: Share = TEST_SHARE,
    on_error: OnError = "stop",
    megapixels: float = MEGAPIXELS,
) -> Dataset:
    """A folder that `save_to_disk` of Hugging Face's datasets made, of one split or of several.

    `train` is trained on; tested is on `test`, else on `validation`, else on a share of each class.
    Beside `test`, `validation` is kept for validation. `image` and `label` name the columns, if
    there are several that may be meant, and `client` another column that names the clients. Columns
    of numbers and texts are kept. Images that cannot be decoded are named, or left out if
    `on_error` is "skip". So are images of more than `megapixels`.
    """
    place = source.resolve(path)
    datasets = _datasets()
    with reading(place, REMEDY):
        found = datasets.load_from_disk(str(place))
    splits = dict(found) if isinstance(found, dict) else {"train": found}
    chosen, remark = _parts(splits, place)
    features = chosen["train"].features
    image = _column(features, image, "image", (datasets.Image,), place)
    label = _column(features, label, "label", (datasets.ClassLabel, datasets.Value), place)
    kept = [
        name
        for name, feature in features.items()
        if isinstance(feature, datasets.Value) and name not in (image, label)
    ]
    if client is not None and client not in kept:
        raise no_column(f"{place} has", client, kept)
    with reading(place, REMEDY):
        labels = [value for split in chosen.values() for value in split[label]]
        columns = {
            name: _values([value for split in chosen.values() for value in split[name]])
            for name in kept
        }
        stored: dict[str, Any] = {
            part: split.select_columns([image]).cast_column(image, datasets.Image(decode=False))
            for part, split in chosen.items()
        }
    classes, labels = _numbered(labels, getattr(features[label], "names", None), place, label)
    demand_labels(np.array(labels), f"{place}: {label}")

    def opened(file: Path) -> io.BytesIO:
        return stored_bytes(stored[file.parent.name][int(file.name)][image])

    alone = len(chosen) == 1  # rows are then divided by a hash of their numbers alone
    names = [
        str(row) if alone else f"{part}/{row}"
        for part, split in chosen.items()
        for row in range(len(split))
    ]
    found = Found(
        place.resolve().name,
        place / "train" if alone else place,
        names,
        labels,
        classes or [str(number) for number in range(1 + max(labels))],
        [part for part, split in chosen.items() for _ in range(len(split))],
        columns,
        client or ("client" if "client" in columns else None),
        remark,
        opened,
    )
    form = Form(size, channels, fit, megapixels)
    return dataset(found, form, test_share, on_error, source.watch)


def stored_bytes(row: Mapping[str, Any] | None) -> io.BytesIO:
    """The bytes of an image; `datasets` itself would open a path or URL that is stored instead."""
    content = (row or {}).get("bytes")
    if not content:
        raise ValueError("its bytes are not there, as save_to_disk puts them there")
    return io.BytesIO(content)


def names_clients(folder: Path) -> bool:
    """Whether a saved data set has a column `client`; False if it cannot be read."""
    for place in (*(folder / name for name in SPELLINGS["train"]), folder):
        try:
            content = json.loads((place / "dataset_info.json").read_text(encoding="utf-8"))
            return "client" in content["features"]
        except (OSError, ValueError, LookupError, TypeError):
            continue
    return False


def _datasets() -> Any:
    try:
        import datasets
    except ImportError as error:
        raise ValueError(
            'dataset "hugging-face" needs datasets: pip install "fedlens[hugging-face]"'
        ) from error
    return datasets


def _parts(splits: Mapping[str, Any], place: Path) -> tuple[dict[Part, Any], str | None]:
    """The splits by part, and a remark for the user or None; splits of other names are ignored."""
    named: dict[Part, str] = {}
    for name in splits:
        part = part_named(name)
        if part == "validation" and not len(splits[name]):
            continue
        if part is not None and named.setdefault(part, name) != name:
            raise ValueError(
                f"{place} has the splits {named[part]} and {name}, which both are for {part}: put "
                "them together, or rename one"
            )
    if "train" not in named:
        raise ValueError(f"{place} has the splits {', '.join(splits)}: call one of them train")
    if not len(splits[named["train"]]):
        raise ValueError(f"{place} has no rows to train on: add some")
    rows = [part for part, name in named.items() for _ in range(len(splits[name]))]
    parts, remark = with_tests(rows, place)
    in_the_end = dict(zip(rows, parts, strict=True))  # validation may take the place of test
    return {in_the_end.get(part, part): splits[name] for part, name in named.items()}, remark


def _column(
    features: Mapping[str, Any],
    given: str | None,
    usual: str,
    kinds: tuple[type, ...],
    place: Path,
) -> str:
    """The given column, else the only column of the first kind, else the one called `usual`."""
    fitting = [name for name, feature in features.items() if isinstance(feature, kinds)]
    if not fitting:
        kind = kinds[0].__name__
        raise ValueError(
            f"{place} has no column of {usual}s among {', '.join(features)}: make one with "
            f"cast_column(NAME, datasets.{kind}()), and save it again"
        )
    if given is not None:
        if given not in fitting:
            raise ValueError(
                f"{place} has no {usual}s in {given!r}: choose of {', '.join(fitting)}"
            )
        return given
    certain = [name for name in fitting if isinstance(features[name], kinds[0])]
    if len(certain) == 1:
        return certain[0]
    if usual in fitting:
        return usual
    raise ValueError(
        f"{place} does not say which column has the {usual}s: set {usual} = ..., one of "
        f"{', '.join(certain or fitting)}"
    )


def _numbered(
    labels: list[Any], names: Sequence[str] | None, place: Path, label: str
) -> tuple[Sequence[str] | None, list[int]]:
    """The class names and the labels as class numbers; whole numbers are kept as they are."""
    if all(isinstance(value, int) and value >= 0 for value in labels):
        return names, labels
    if all(isinstance(value, str) for value in labels):
        classes = sorted({*labels})
        number = {name: i for i, name in enumerate(classes)}
        return classes, [number[text] for text in labels]
    raise ValueError(
        f"{place}: {label} is not given for every row, as a whole number from 0 or as text: leave "
        "out the rows without one, or set label to another column"
    )


def _values(values: Sequence[Any]) -> Column:
    """A column of numbers or texts. Missing values are NaN, or the empty text."""
    found = np.array([np.nan if value is None else value for value in values])
    if found.dtype.kind in "biuf":
        return found
    return np.array(["" if value is None else str(value) for value in values])
