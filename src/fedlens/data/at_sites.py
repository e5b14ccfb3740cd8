"""A data set without images: those of a fleet's sites, and none at its server."""

from __future__ import annotations

import torch

from fedlens.config.sections import Count
from fedlens.core.federation import Dataset, Examples, Fit
from fedlens.data.places import Source


def at_sites(
    source: Source,
    *,
    classes: tuple[str, ...],
    shape: tuple[Count, Count, Count],
    fit: Fit = "stretch",
    multi_label: bool = False,
) -> Dataset:
    """No images here: those of a fleet's sites have these classes.

    Sites resize them to `shape` (channels, height, width), as `fit` says. With `multi_label` an
    image may have several of the classes.
    """
    images = torch.zeros((0, *shape), dtype=torch.uint8)
    none = Examples(images, torch.zeros(0, dtype=torch.int64), multi_label=multi_label)
    return Dataset("at-sites", none, none, classes, fit=fit)
