"""Training on features: what frozen layers make of a run's images is computed once, and kept."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from fedlens.config.experiment import Experiment
from fedlens.core.federation import DIGESTED, Dataset, Examples
from fedlens.core.trees import bytes_of
from fedlens.data.augment import Augment
from fedlens.data.places import Counted, cache
from fedlens.network.cut import Cut, cut
from fedlens.network.network import Network
from fedlens.storage.files import replacing
from fedlens.storage.free_memory import available
from fedlens.storage.reading import reading

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
    parts: Mapping[str, Examples | None],
    made: Cut,
    device: torch.device,
    watch: Counted | None = None,
) -> dict[str, Examples | None]:
    """The same examples with features in place of images; parts that shared these share them."""
    given = {id(part.images): part.images for part in parts.values() if part is not None}
    total, done = sum(map(len, given.values())), 0
    there: dict[int, Tensor] = {}
    for name, images in given.items():
        there[name] = _kept(made, images, device, watch, done, total)
        done += len(images)
    return {
        name: part if part is None else replace(part, images=there[id(part.images)])
        for name, part in parts.items()
    }


def _kept(
    made: Cut, images: Tensor, device: torch.device, watch: Counted | None, done: int, total: int
) -> Tensor:
    """Features from the cache, or computed and put there if it can be written."""
    place = cache() / "features" / f"{_digest(made, images)}.npy"
    if place.is_file():
        with reading(place, "delete it, and it is computed again"):
            return torch.from_numpy(np.load(place, allow_pickle=False))
    parts = []
    for start in range(0, len(images), AT_ONCE):
        parts.append(made.features(images[start : start + AT_ONCE].to(device)).cpu())
        if watch is not None:
            watch(done + min(start + AT_ONCE, len(images)), total)
    features = torch.cat(parts)
    try:
        with replacing(place) as file:
            np.save(file, features.numpy(), allow_pickle=False)
    except OSError:
        pass  # a cache that cannot be written only costs time
    return features


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
