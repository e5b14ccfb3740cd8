"""The size of an image after convolutions and pools."""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy
from itertools import count

import torch
from torch import Tensor, nn


def num_features(model: str, layers: Iterable[nn.Module], shape: tuple[int, int, int]) -> int:
    """The number of outputs of these layers for an image of [channels, height, width]."""
    features = deepcopy(nn.Sequential(*layers)).to("meta")  # which computes shapes alone

    def outputs(height: int, width: int) -> int:
        try:
            made: Tensor = features(torch.empty(1, shape[0], height, width, device="meta"))
        except RuntimeError:  # a layer that is larger than the image it gets
            return 0
        return made.numel()

    _, height, width = shape
    if not (found := outputs(height, width)):
        least = next(side for side in count(1) if outputs(side, side))
        raise ValueError(
            f"{model} cannot take images of {height} x {width}: "
            f"resize them to at least {least} x {least}, or choose another model"
        )
    return found
