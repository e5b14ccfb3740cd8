"""Map-style data sets, as in PyTorch and torchvision: each item is an image and its label."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from fedlens.core.federation import Dataset, Examples, Fit
from fedlens.data.arrays import demand_labels, held_out, mean_and_std
from fedlens.data.pictures import Form, pixels_of
from fedlens.data.places import Counted
from fedlens.storage import free_memory
from fedlens.storage.reading import reason


@runtime_checkable
class MapStyle(Protocol):
    """A data set with a length, whose items are pairs of an image and its label.

    An image is a Pillow image, or a tensor [channels, H, W] of bytes or floats.
    """

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


def map_style(
    train: MapStyle,
    test: MapStyle | None = None,
    *,
    name: str | None = None,
    size: int | None = None,
    fit: Fit = "stretch",
    channels: Literal[1, 3] | None = None,
    test_share: float = 0.2,
    watch: Counted | None = None,
) -> Dataset:
    """Make a data set from one of torchvision's kind, read once: later changes have no effect.

    Pillow images and tensors of bytes are resized to `size` × `size` as `fit` says, and are gray or
    in colour like the first, unless `channels` is given; floats are used as they are. Without
    `test`, a fixed share of each class of `train`, `test_share`, becomes test. `train.classes`
    names the labels. `watch` is called with the number of items read and the total.
    """
    if size is not None and size < 1:
        raise ValueError(f"size is {size}: choose a number of pixels, such as 32")
    called = name or type(train).__name__
    parts = {"train": train} if test is None else {"train": train, "test": test}
    done, total = itertools.count(1), sum(map(len, parts.values()))

    def tell() -> None:
        if watch is not None:
            watch(next(done), total)

    form = Form(size, channels, fit)
    read = {part: _examples(items, part, form, tell) for part, items in parts.items()}
    num_classes = 1 + max(int(part.labels.max()) for part in read.values())
    classes = tuple(map(str, getattr(train, "classes", range(num_classes))))
    if test is None:
        rows, labels = map(str, range(len(read["train"]))), read["train"].labels
        chosen = torch.tensor(held_out([*rows], labels.tolist(), test_share, None, called))
        images = read["train"].images
        read = {
            part: Examples(images[mask], labels[mask])
            for part, mask in (("train", ~chosen), ("test", chosen))
        }
    images, mean, std = read["train"].images, None, None
    if not images.is_floating_point():
        mean, std = mean_and_std(images)
    return Dataset(called, read["train"], read["test"], classes, mean, std, fit=fit)


def _examples(items: MapStyle, what: str, form: Form, tell: Callable[[], None]) -> Examples:
    """Read all items of a data set, which error messages call `what`; `tell` is called for each."""
    count = len(items)
    if not count:
        raise ValueError(f"{what} has no items: add some")
    labels = np.zeros(count, np.int64)
    images = torch.empty(0)
    for i in range(count):
        where = f"item {i} of {what}"
        try:
            image, label = items[i]
            one, labels[i] = _tensor(image, form), operator.index(label)
        except Exception as error:  # a data set or a decoder may raise anything
            raise ValueError(
                f"{where} cannot be read ({reason(error)}): let it be a pair, a Pillow image or a "
                "tensor [channels, height, width], and a whole number"
            ) from error
        if i == 0:
            needed = count * one.numel() * one.element_size()
            free_memory.demand(
                f"a set of {count:,} images", {"pixels": needed}, "choose a smaller size"
            )
            images = torch.empty(count, *one.shape, dtype=one.dtype).to(
                memory_format=torch.channels_last
            )
        if one.shape != images.shape[1:] or one.dtype != images.dtype:
            raise ValueError(
                f"{where} is {_said(one)}, but the first is {_said(images[0])}: set size, and "
                "channels, so that all are alike"
            )
        if labels[i] < 0:
            raise ValueError(f"{where} has the label {labels[i]}: number classes from 0")
        images[i] = one
        tell()
    demand_labels(labels, what)
    return Examples(images, torch.from_numpy(labels))


def _tensor(image: Any, form: Form) -> Tensor:
    """One image as a tensor [channels, H, W]."""
    from PIL import Image

    if isinstance(image, Tensor):
        tensor = image[None] if image.ndim == 2 else image
        if tensor.ndim != 3 or not (tensor.is_floating_point() or tensor.dtype is torch.uint8):
            raise ValueError(f"a tensor {tensor.dtype} {list(image.shape)}")
        same_size = form.size is None or tensor.shape[1:] == (form.size, form.size)
        if same_size and form.channels in (None, len(tensor)):
            return tensor
        if tensor.is_floating_point() or len(tensor) not in (1, 3):
            raise ValueError("floats are used as they are: leave size and channels out")
        image = Image.fromarray(tensor.permute(1, 2, 0).squeeze(2).numpy())
    if not isinstance(image, Image.Image):
        raise ValueError(f"a {type(image).__name__} is not an image")
    pixels = pixels_of(image, form)
    return torch.from_numpy(pixels.copy()).permute(2, 0, 1)


def _said(image: Tensor) -> str:
    kind = "floats" if image.is_floating_point() else "bytes"
    return f"{'×'.join(map(str, image.shape))} {kind}"
