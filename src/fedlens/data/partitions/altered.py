"""Partitions that change the examples of each client.

Another partition assigns the examples; these then change the examples, differently for each
client. The original examples are not kept, so that no algorithm can read them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedlens.config.names import PLAIN_PARTITIONS
from fedlens.config.options import Bounds
from fedlens.config.sections import Chance
from fedlens.core.federation import Examples, Holdings, Pool
from fedlens.data.partitions.dealing import apply_partition

Most = Annotated[float, Bounds(least=0)]
CHUNK = 1024  # images changed at a time, to limit memory use


@dataclass(frozen=True)
class Altered:
    """Examples as the clients see them, and which client holds which."""

    examples: Examples
    held: Holdings


def noisy_labels(
    pool: Pool,
    *,
    of: str | dict[str, Any] = "iid",
    low: Chance = 0.0,
    high: Chance = 0.5,
) -> Altered:
    """The partition `of`, where each client has a share of wrong labels, from `low` to `high`.

    The share is drawn for each client, and every example is wrong with that chance. A wrong label
    is any of the others, each as likely.
    """
    if low > high:
        raise ValueError(f"low is {low} and high {high}: choose a low of no more than high")
    examples, num_classes, _, rng = pool
    if num_classes < 2:
        raise ValueError("one class leaves no wrong label: choose another partition")
    held = _inner(pool, of)
    share = rng.uniform(low, high, len(held))[held.owners.numpy()]  # [n]
    wrong = rng.random(len(share)) < share
    shift = np.where(wrong, rng.integers(1, num_classes, len(share)), 0)
    labels = examples.labels.clone()
    labels[held.index] = (labels[held.index] + torch.from_numpy(shift)) % num_classes
    return Altered(replace(examples, labels=labels), held)


def shifted(
    pool: Pool,
    *,
    of: str | dict[str, Any] = "iid",
    rotation: Most = 0.0,
    blur: Most = 0.0,
    noise: Most = 0.0,
) -> Altered:
    """The partition `of`, where each client's images are turned, blurred and noisy in its own way.

    For each client are drawn: an angle up to `rotation` degrees to either side, the width of a
    Gaussian blur up to `blur` pixels, and the standard deviation of white noise up to `noise`,
    where images run from 0 to 1.
    """
    examples, rng = pool.examples, pool.rng
    side = max(examples.images.shape[2:])
    if blur > side:
        raise ValueError(f"blur is {blur:g}: choose no more than {side}, the side of an image")
    held = _inner(pool, of)
    angles, widths, levels = rng.uniform(
        (-rotation, 0, 0), (rotation, blur, noise), (len(held), 3)
    ).T
    images = examples.read(slice(None)).clone(memory_format=torch.preserve_format)
    for client in range(len(held)):
        for part in torch.split(held.members(client), CHUNK):
            seen = images[part].to(torch.float32)
            if angles[client]:
                seen = _turned(seen, angles[client])
            if widths[client]:
                seen = _blurred(seen, widths[client])
            if levels[client]:
                white = rng.standard_normal(tuple(seen.shape), dtype=np.float32)
                scale = 255 if images.dtype == torch.uint8 else 1
                seen = seen + torch.from_numpy(white) * (scale * float(levels[client]))
            if images.dtype == torch.uint8:
                seen = seen.round().clamp(0, 255)
            images[part] = seen.to(images.dtype)
    return Altered(replace(examples, images=images, rows=None), held)


def _inner(pool: Pool, of: str | Mapping[str, Any]) -> Holdings:
    """The holdings from the partition `of`, which is a name or a table with a name."""
    table = {"name": of} if isinstance(of, str) else dict(of)
    name = table.pop("name", None)
    if not isinstance(name, str):
        raise ValueError(f"of is {of!r}: give the name of a partition, or a table with a name")
    made = apply_partition(name, table, pool, PLAIN_PARTITIONS)
    if not isinstance(made, Holdings):
        raise ValueError(
            f"of is {name!r}, which does not simply give each example to one client for good: "
            "choose another partition"
        )
    return made


def _turned(images: Tensor, degrees: float) -> Tensor:
    """Images rotated about their centre; the empty corners are filled by repeating the border."""
    _, _, height, width = images.shape
    sin, cos = math.sin(math.radians(degrees)), math.cos(math.radians(degrees))
    theta = torch.tensor([[cos, -sin * height / width, 0], [sin * width / height, cos, 0]])
    grid = F.affine_grid(theta.expand(len(images), 2, 3), list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, padding_mode="border", align_corners=False)


def _blurred(images: Tensor, width: float) -> Tensor:
    reach = max(math.ceil(3 * width), 1)
    kernel = torch.exp(-((torch.arange(-reach, reach + 1) / width) ** 2) / 2)
    kernel = kernel / kernel.sum()
    channels = images.shape[1]
    padded = F.pad(images, (reach, reach, reach, reach), mode="replicate")
    rows = F.conv2d(padded, kernel.view(1, 1, 1, -1).repeat(channels, 1, 1, 1), groups=channels)
    return F.conv2d(rows, kernel.view(1, 1, -1, 1).repeat(channels, 1, 1, 1), groups=channels)
