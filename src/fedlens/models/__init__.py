"""Image classifiers.

A model is a function of the images' shape (channels, height, width) and of the number of classes;
its keyword-only parameters are its options. Weights come from PyTorch's default initialisation
and torch's global generator, unless the function says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from fedlens.config import names

if TYPE_CHECKING:
    from torch import nn

MODELS: Mapping[str, Callable[..., nn.Module]] = names.MODELS
