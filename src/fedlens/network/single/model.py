"""A model of one client at a time: the plain module, or its fast path."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedlens.core import Tree
from fedlens.network.functional import FunctionalModule
from fedlens.network.single.layers import FastLayer, FastPath, on_fast_path


@dataclass(frozen=True)
class SingleModel:
    """One client (C = 1) whose batch has no padding."""

    module: FunctionalModule
    layers: tuple[FastLayer, ...] = ()  # the layers of `module` with a fast path
    fast: FastPath | None = None  # the path that they take, if any

    @property
    def takes_steps(self) -> bool:
        return self.fast is not None and self.fast.lr is not None

    def __call__(
        self, params: Tree, buffers: Tree, images: Tensor, keys: Tensor, mask: Tensor
    ) -> tuple[Tensor, Tree]:
        tensors = {name: t.squeeze(0) for name, t in (params | buffers).items()}
        # For a single example PyTorch's BatchNorm raises an error; the masked form does not.
        padding = mask.squeeze(0) if mask.shape[1] == 1 else mask.new_empty(0)
        inputs = channels_last(self.normalise(images.squeeze(0)))
        with on_fast_path(self.layers, self.fast):
            logits = self.module(tensors, inputs, keys.squeeze(0), padding, training=True)
        return logits.unsqueeze(0), buffers

    def normalise(self, images: Tensor) -> Tensor:
        return self.module.numerics.normalise(images)


def channels_last(images: Tensor) -> Tensor:
    """The same images in channels-last layout, in which convolutions on a CPU are fastest."""
    _, channels, height, width = images.shape
    if channels > 1:
        return images.contiguous(memory_format=torch.channels_last)
    # With one channel both layouts are the same bytes: the strides tell PyTorch which one it is.
    return images.contiguous().as_strided(images.shape, (height * width, 1, width, 1))
