"""Image files, decoded side by side into one array."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from fedlens.core import Dataset, Examples
from fedlens.data.arrays import Column, Pixels, examples, held_out, mean_and_std

ENDINGS = frozenset(  # what Pillow reads everywhere
    (".bmp", ".gif", ".jpeg", ".jpg", ".pbm", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
)


@dataclass(frozen=True)
class Listed:
    """Image files of one part with their labels, in order."""

    names: Sequence[str]  # as people wrote them, relative to `base`
    labels: Sequence[int]
    base: Path
    columns: Mapping[str, Column] = field(default_factory=dict)

    def take(self, chosen: Sequence[bool]) -> Listed:
        index = [i for i, yes in enumerate(chosen) if yes]
        return Listed(
            [self.names[i] for i in index],
            [self.labels[i] for i in index],
            self.base,
            {name: column[index] for name, column in self.columns.items()},
        )

    def divided(self, share: float) -> tuple[Listed, Listed]:
        """Train and test: a fixed share of each class becomes test."""
        chosen = held_out(self.names, self.labels, share)
        if not any(chosen):
            raise ValueError(f"{self.base}: one image a class leaves none to test on: add images")
        return self.take([not test for test in chosen]), self.take(chosen)


def dataset(
    name: str,
    train: Listed,
    test: Listed,
    classes: Sequence[str],
    size: int | None,
    channels: int,
) -> Dataset:
    """The data set of these files. Without a `size`, all must be as large as the first."""
    if size is not None and size < 1:
        raise ValueError(f"size is {size}: choose a number of pixels, such as 32")

    def decoded(part: Listed) -> Examples:
        paths = [part.base / name for name in part.names]
        return examples(decode(paths, shape, channels, size), np.asarray(part.labels), part.columns)

    shape = (size, size) if size else read(train.base / train.names[0], channels).shape[:2]
    decoded_train = decoded(train)
    mean, std = mean_and_std(decoded_train.images)
    return Dataset(name, decoded_train, decoded(test), tuple(classes), mean, std)


def decode(
    paths: Sequence[Path], shape: tuple[int, ...], channels: int, size: int | None
) -> Pixels:
    """The pixels [N, H, W, channels] of image files, each resized to `size` if that is given."""
    pixels = np.empty((len(paths), *shape, channels), np.uint8)

    def fill(i: int) -> None:
        image = read(paths[i], channels, size)
        if image.shape != pixels.shape[1:]:
            height, width = image.shape[:2]
            raise ValueError(
                f"{paths[i]} is {width}×{height}, but the first image is {shape[1]}×{shape[0]}: "
                "set size, and all are resized to it"
            )
        pixels[i] = image

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for _ in pool.map(fill, range(len(paths))):
            pass
    return pixels


def read(path: Path, channels: int, size: int | None = None) -> Pixels:
    """The pixels [H, W, channels] of an image file, resized to `size` if that is given."""
    from PIL import Image, ImageOps

    try:
        with Image.open(path) as file:
            deep = file.mode.startswith(("I", "F"))
            upright = ImageOps.exif_transpose(file)
            image = upright.convert("L" if channels == 1 else "RGB")
    except Exception as error:  # broken files make decoders raise anything
        raise ValueError(f"{path} cannot be decoded ({error}): repair it or take it out") from error
    if deep:
        raise ValueError(f"{path} has more than 8 bits a pixel: convert it to 8 bits")
    if size is not None and image.size != (size, size):
        image = image.resize((size, size), Image.Resampling.BILINEAR)
    pixels = np.asarray(image)
    return pixels.reshape(*pixels.shape[:2], channels)
