"""Make examples from arrays of pixels."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedlens.config.options import did_you_mean
from fedlens.core.federation import PATIENT, Examples
from fedlens.core.label_sets import unpacked

Pixels = NDArray[np.uint8]
Column = np.ndarray[Any, Any]

MOST_CLASSES = 1 << 20
CHUNK = 1024  # images counted at a time, to limit memory use


def examples(
    pixels: Pixels,
    labels: Column,
    columns: Mapping[str, Column] | None = None,
    some: slice | Column = slice(None),
) -> Examples:
    """Some examples of pixels [N, H, W] or [N, H, W, channels], which stay channels-last."""
    stored = np.require(pixels[some], requirements=["C", "W"])
    channels = pixels.shape[3] if pixels.ndim == 4 else 1
    images = torch.from_numpy(stored.reshape(*stored.shape[:3], channels)).permute(0, 3, 1, 2)
    kept = {name: column[some] for name, column in (columns or {}).items()}
    return Examples(images, torch.from_numpy(labels[some].astype(np.int64)), kept)


def in_bytes(values: Column, ends: tuple[float, float] | None = None) -> Pixels:
    """Gray values of any range in 0 to 255, from `ends[0]` to `ends[1]`.

    By default the darkest becomes 0 and the brightest 255: no file says how many bits are used.
    """
    wide = values.astype(np.float64)
    if not np.isfinite(wide).all():
        raise ValueError("it has pixels that are not finite")
    low, high = ends or (wide.min(), wide.max())
    scaled = (wide - low) * (255 / (high - low) if high > low else 0)
    shades: Pixels = np.rint(scaled.clip(0, 255)).astype(np.uint8)
    return shades


def demand_labels(labels: Column, where: str) -> None:
    """Raise ValueError for labels that are too large to be class numbers from 0."""
    if len(labels) and int(labels.max()) >= MOST_CLASSES:
        raise ValueError(
            f"{where} has the label {labels.max()}: number classes from 0, up to {MOST_CLASSES:,}"
        )


def renumbered(
    labels: Tensor, names: Sequence[str], wanted: Sequence[str], several: bool, of: tuple[Any, str]
) -> Tensor:  # [N] -> [N]
    """Labels of classes called `names`, as `wanted` numbers its own; with `several`, `label_sets`.

    A class that a label has and `wanted` lacks raises a ValueError; `of` says whose data these are,
    and who lacks it.
    """
    rows = unpacked(labels, len(names)) if several else None
    used = np.unique(labels) if rows is None else rows.any(0).nonzero().flatten()
    number = {name: k for k, name in enumerate(wanted)}
    for name in sorted(names[int(k)] for k in used):
        if name not in number:
            hint = did_you_mean(name, wanted)
            raise ValueError(f"{of[0]} has the class {name!r}, which {of[1]} does not have: {hint}")
    table = torch.tensor([number.get(name, 0) for name in names])
    return table[labels] if rows is None else (rows << table).sum(1)


def mean_and_std(images: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and std per channel of uint8 images scaled to [0, 1]; a constant channel has std 1."""
    num_channels = images.shape[1]
    counts = torch.zeros(num_channels, 256, dtype=torch.float64)
    for start in range(0, len(images), CHUNK):
        part = images[start : start + CHUNK]
        for channel in range(num_channels):
            counts[channel] += torch.bincount(part[:, channel].flatten(), minlength=256)
    share = counts / counts.sum(1, keepdim=True)
    value = torch.arange(256, dtype=torch.float64) / 255
    mean = share @ value
    std = (share * (value - mean[:, None]).square()).sum(1).sqrt()
    return tuple(mean.tolist()), tuple(torch.where(std > 0, std, 1.0).tolist())


def held_out(
    names: Sequence[str],
    labels: Sequence[int],
    share: float,
    sites: Sequence[str] | None = None,
    where: object = "the data set",
) -> list[bool]:
    """Which examples become test: a fixed `share` of each class, at least one and never all.

    The hash of the name decides, so that the choice is the same on every machine, and examples of
    one name, such as that of a patient, are on one side only. Each of the `sites` gives about the
    same share of a class. A site gives its last training image only if no other site has an image
    of the class to spare.
    If no class has two images, this raises a ValueError, which says `where`.
    """
    if not 0 < share < 1:
        raise ValueError(f"test_share is {share}: choose a share between 0 and 1")
    classes: dict[int, dict[str, list[int]]] = {}
    places: dict[tuple[int, str], set[str]] = {}
    site_of = dict(zip(names, sites or [""] * len(names), strict=True))
    for i, (name, label) in enumerate(zip(names, labels, strict=True)):
        classes.setdefault(label, {}).setdefault(name, []).append(i)
        places.setdefault((label, site_of[name]), set()).add(name)
    # The relative rank of each image among its site's images of the class: all sites are cut alike.
    depth: dict[tuple[int, str], float] = {}
    for (label, _), members in places.items():
        for rank, name in enumerate(sorted(members, key=_hash)):
            depth[label, name] = (rank + 0.5) / len(members)
    left = Counter(site_of.values())  # training images that each site still has
    tested: dict[str, bool] = {}  # names on either side, by an earlier class
    for label, found in classes.items():
        ranked = sorted(found, key=lambda name: (depth[label, name], _hash(name)))
        num_test = min(max(round(share * len(ranked)), 1), len(ranked) - 1)
        num_test -= sum(tested.get(name, False) for name in ranked)
        spare: list[str] = []
        rest: list[str] = []
        for name in (name for name in ranked if name not in tested):
            if len(spare) < num_test and left[site_of[name]] > 1:
                left[site_of[name]] -= 1
                spare.append(name)
            else:
                rest.append(name)
        for place, name in enumerate([*spare, *rest]):
            tested[name] = place < num_test
    if not any(tested.values()):
        raise ValueError(f"{where}: one image a class leaves none to test on: add images")
    return [tested[name] for name in names]


def named_by_patient(names: Sequence[str], patients: Sequence[str] | Column | None) -> list[str]:
    """The patient of each image, or its own name where no patient is known."""
    if patients is None:
        return list(names)
    return [f"{PATIENT} {who}" if who else name for name, who in zip(names, patients, strict=True)]


def _hash(name: str) -> bytes:
    return hashlib.sha256(os.fsencode(name)).digest()
