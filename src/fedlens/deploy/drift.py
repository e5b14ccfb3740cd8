"""Whether new images look to a model like those that it was trained on.

A model sees an image as features: what its last linear layer is given. An image is as strange as
its features are far from the nearest of the training images (Sun et al. 2022, arXiv:2204.06507),
all scaled to length 1. New images are compared with the run's own test images, which nobody trained
on either: how often one of the first is stranger than one of the second.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedlens.evaluation.intervals import FEWEST, Z95, Interval
from fedlens.network.layout import Layout
from fedlens.report.blocks import Block, Strip, Table
from fedlens.report.numbers import NONE, format_number

MOST = 500  # training images, and test images, that are compared with


class Seen(NamedTuple):
    """What a model makes of some images."""

    features: Tensor  # [n, d]
    confidence: Tensor  # [n] the probability of the likeliest class


@contextmanager
def features_of(module: nn.Module) -> Iterator[list[Tensor]]:
    """Collect the features of all batches that go through a module in the `with` block.

    They are its logits, if it has no linear layer.
    """
    kept: list[Tensor] = []
    last = Layout.of(module).last
    layer = module if last is None else module.get_submodule(last)

    def keep(_: nn.Module, given: tuple[Tensor, ...], made: Tensor) -> None:
        kept.append((made if last is None else given[0]).detach().flatten(1))

    hook = layer.register_forward_hook(keep)
    try:
        yield kept
    finally:
        hook.remove()


def strangeness(features: Tensor, trained_on: Tensor) -> Tensor:  # [n, d], [m, d] -> [n]
    """How far each image is from the nearest training image: 0 to 2."""
    alike = F.normalize(features.double(), dim=1) @ F.normalize(trained_on.double(), dim=1).T
    return (2 - 2 * alike.amax(1)).clamp(min=0).sqrt()


def stranger(new: Tensor, known: Tensor) -> tuple[float, Interval]:  # [n], [m]
    """In which share of pairs a new image is the stranger one, ties being half; and its interval.

    That is the area under a ROC curve, with the variance of DeLong et al. (1988); there is no
    interval for fewer than `FEWEST` images.
    """
    wins = (new[:, None] > known).double() + (new[:, None] == known).double() / 2
    share = float(wins.mean())
    if min(wins.shape) < FEWEST:
        return share, None
    variance = wins.mean(1).var() / len(new) + wins.mean(0).var() / len(known)
    half = Z95 * math.sqrt(float(variance))
    return share, (max(share - half, 0.0), min(share + half, 1.0))


def drift(
    new: Seen, trained_on: Tensor, tested_on: Seen, sites: Mapping[str, Tensor]
) -> dict[str, Any]:
    """How strange new images are beside the run's test images, all and by site, ready for JSON."""
    known, strange = (strangeness(one.features, trained_on) for one in (tested_on, new))

    def about(some: Tensor) -> dict[str, Any]:
        share, interval = stranger(strange[some], known)
        sure = float(new.confidence[some].double().mean())
        told = {"images": len(strange[some]), "stranger": share, "interval": interval}
        return told | {"confidence": sure, "distances": strange[some].tolist()}

    found = about(torch.ones(len(strange), dtype=torch.bool))
    sure = float(tested_on.confidence.double().mean())
    found["tested_on"] = {"confidence": sure, "distances": known.tolist()}
    if len(sites) > 1:
        found["by_client"] = {name: about(some) for name, some in sites.items() if some.any()}
    return found


def in_words(found: Mapping[str, Any]) -> str:
    """What it comes to, in a sentence."""
    percent = [found["stranger"], found["confidence"], found["tested_on"]["confidence"]]
    share, sure, before = (format_number(x, True) for x in percent)
    measured = (
        f"in {share} of pairs a new image is stranger than a test image of the run (alike: 50%), "
        f"and the model is sure of it to {sure} on average, of a test image to {before}"
    )
    ends = found["interval"]
    if ends is None:
        return (
            f"These are too few images to say whether they look like those of training: {measured}."
        )
    if ends[0] <= 0.5:
        return f"These images look like those of training: {measured}."
    whole = found.get("by_client", {})
    most = max(whole, key=lambda name: whole[name]["stranger"], default=None)
    worst = f" {most} differs most." if most is not None else ""
    return f"These images look different from those of training: {measured}.{worst}"


def drift_blocks(found: Mapping[str, Any]) -> list[Block]:
    """A figure of how strange images are, by site, and the numbers."""
    sites = found.get("by_client", {})
    groups = [("test images of the run", found["tested_on"]["distances"])]
    groups += [(name, one["distances"]) for name, one in sites.items()]
    groups += [] if sites else [("these images", found["distances"])]
    return [
        Strip(
            title="How strange the images are",
            caption="How far each image is from the nearest training image, by the features of the "
            "model. A dot is an image; the stroke is the median.",
            groups=groups,
            x_label="distance to the nearest training image",
        ),
        Table(title="By site", header=DRIFT, rows=drift_rows(found)),
    ]


DRIFT = ["", "images", "stranger than a test image", "95% interval", "sure to"]


def drift_rows(found: Mapping[str, Any]) -> list[Sequence[str]]:
    named = [("all", found), *found.get("by_client", {}).items()]
    return [
        [
            name,
            str(one["images"]),
            format_number(one["stranger"], True),
            " to ".join(format_number(end, True) for end in one["interval"] or ()) or NONE,
            format_number(one["confidence"], True),
        ]
        for name, one in named
    ]
