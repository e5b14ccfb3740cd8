"""Untrained models of timm (PyTorch Image Models), chosen as timm:NAME.

As with other models, `weights` reads published weights from a file.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import nn

from fedlens.config.options import did_you_mean
from fedlens.storage.reading import keeping_torch, reason


@cache  # one function for each name: its options are read once
def timm(architecture: str) -> Callable[..., nn.Module]:
    """The function that makes a model of this name."""

    def make(shape: tuple[int, int, int], num_classes: int, *, drop_rate: float = 0.0) -> nn.Module:
        """A model of timm, for images of this shape; `drop_rate` is that of its layers."""
        library = _timm(architecture)
        if not library.is_model(architecture):
            hint = did_you_mean(architecture, library.list_models())
            raise ValueError(f"timm has no model {architecture!r}: {hint}")
        channels, height, width = shape
        options: dict[str, Any] = {"in_chans": channels, "num_classes": num_classes}
        # Transformers have a fixed image size; other models take any size, and no such option.
        published = library.get_pretrained_cfg(architecture)
        if published is not None and published.fixed_input_size:
            options["img_size"] = (height, width)
        try:
            module: nn.Module = library.create_model(architecture, drop_rate=drop_rate, **options)
        except Exception as error:  # an architecture may reject any of these
            raise ValueError(
                f"model 'timm:{architecture}' cannot be made for images {shape} "
                f"({reason(error)}): choose another size of images, or another model"
            ) from error
        return module

    return make


def _timm(architecture: str) -> Any:
    try:
        return _imported()
    except Exception as error:  # of timm, or of torchvision, which it imports
        why, remedy = "", keeping_torch("fedlens[timm]")
        if not isinstance(error, ModuleNotFoundError):
            built = f"torch {torch.__version__}"
            why, remedy = f" ({reason(error)})", f"get torchvision from where {built} is from"
        raise ValueError(
            f"model 'timm:{architecture}' needs timm, which cannot be imported{why}: {remedy}"
        ) from error


def _imported() -> Any:
    try:
        import timm
    except RuntimeError:
        # A torchvision that was compiled for another build of torch. Models need no operator that
        # it compiles, only its Python, which is imported once the operators' shapes are left out.
        sys.modules["torchvision._meta_registrations"] = ModuleType("left out")
        import timm
    return timm
