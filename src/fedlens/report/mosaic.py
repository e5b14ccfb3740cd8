"""Draws sample images side by side, in named rows."""

from __future__ import annotations

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from fedlens.report.blocks import Image, Samples
from fedlens.report.look import TOP, WIDTH, Array, headed, short

NAMES = 1.1  # inches for the rows' names
GAP = 2  # pixels between images


def mosaic(block: Samples) -> Figure:
    """The rows as one figure. Small images are enlarged without smoothing."""
    tall, wide = (
        max((image.shape[axis] for _, images in block.rows for image in images), default=1)
        for axis in (0, 1)
    )
    count = max((len(images) for _, images in block.rows), default=1)
    canvas = np.zeros((len(block.rows) * (tall + GAP), count * (wide + GAP), 4), np.uint8)
    for row, (_, images) in enumerate(block.rows):
        for column, image in enumerate(images):
            y, x = row * (tall + GAP), column * (wide + GAP)
            canvas[y : y + image.shape[0], x : x + image.shape[1]] = _opaque(image)
    width = WIDTH - NAMES - 0.1
    height = width * canvas.shape[0] / canvas.shape[1]
    whole = TOP + height + 0.1
    figure = Figure(figsize=(WIDTH, whole))
    FigureCanvasAgg(figure)
    axes = figure.add_axes((NAMES / WIDTH, 0.1 / whole, width / WIDTH, height / whole))
    headed(figure, block.title)
    axes.imshow(canvas, interpolation="nearest", aspect="auto")
    axes.set_xticks([])
    places = [row * (tall + GAP) + tall / 2 for row in range(len(block.rows))]
    axes.set_yticks(places, [short(name, 16) for name, _ in block.rows])
    axes.grid(False)
    for spine in axes.spines.values():
        spine.set_visible(False)
    return figure


def _opaque(image: Image) -> Array:  # -> [H, W, 4]
    colour = np.repeat(image[..., None], 3, axis=2) if image.ndim == 2 else image
    return np.concatenate([colour, np.full((*colour.shape[:2], 1), 255, np.uint8)], axis=2)
