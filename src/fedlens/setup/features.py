"""Training on features: what frozen layers make of a run's images is computed once, and kept."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from fedlens.config.experiment import Experiment
from fedlens.core.federation import DIGESTED, Dataset, Examples
from fedlens.core.trees import bytes_of
from fedlens.data.augment import Augment
from fedlens.data.places import Counted
from fedlens.network.cut import Cut, cut
from fedlens.network.network import Network
from fedlens.storage.free_memory import available
from fedlens.storage.kept import Array, kept

AT_ONCE = 32  # images that pass through the frozen layers together
SHARE = 0.25  # of the free memory that features may take


def cut_for(
    experiment: Experiment, network: Network, dataset: Dataset, cuts: dict[Network, Cut | None]
) -> Cut | None:
    """How the model of an experiment is cut, if images are not augmented anew in each step.

    `cuts` are those of networks that several experiments share.
    """
    if not network.frozen or experiment.augment != Augment():
        return None
    part = dataset.train if len(dataset.train) else dataset.test
    if network not in cuts:
        cuts[network] = cut(network, part.images[:1])
    made = cuts[network]
    if made is None:
        return None
    each = made.features(part.images[:1])
    images = sum(
        len(images) for images in {id(one.images): one.images for one in dataset.parts}.values()
    )
    return made if images * each.nbytes < available() * SHARE else None


def featured(
    parts: Mapping[str, Examples],
    made: Cut,
    device: torch.device,
    watch: Counted | None = None,
    place: Path | None = None,
) -> dict[str, Examples]:
    """The same examples with features in place of images; parts that shared these share them.

    They are kept in the folder `place`, if it is given.
    """
    given = {id(part.images): part.images for part in parts.values()}
    total, done = sum(map(len, given.values())), 0
    there: dict[int, Tensor] = {}
    for name, images in given.items():
        own = None if place is None else place / _digest(made, images)
        compute = partial(_computed, made, images, device, watch, done, total)
        (found,) = kept(own, ["features"], compute)
        there[name] = torch.from_numpy(found)
        done += len(images)
    return {name: replace(part, images=there[id(part.images)]) for name, part in parts.items()}


def _computed(
    made: Cut, images: Tensor, device: torch.device, watch: Counted | None, done: int, total: int
) -> list[Array]:
    parts = []
    for start in range(0, len(images), AT_ONCE):
        parts.append(made.features(images[start : start + AT_ONCE].to(device)).cpu())
        if watch is not None:
            watch(done + min(start + AT_ONCE, len(images)), total)
    return [torch.cat(parts).numpy()]


def _digest(made: Cut, images: Tensor) -> str:
    """Of everything that features depend on."""
    whole = made.whole
    found = hashlib.sha256(repr((whole.mean, whole.std, whole.dtype, images.shape)).encode())
    found.update(str(made.frozen.code).encode())
    for name, tensor in made.frozen.state_dict().items():
        found.update(name.encode())
        found.update(bytes_of(tensor))
    for start in range(0, len(images), DIGESTED):
        found.update(bytes_of(images[start : start + DIGESTED]))
    return found.hexdigest()
