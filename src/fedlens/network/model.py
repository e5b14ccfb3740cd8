"""The interface of a model in training, and the dtypes that all forms of a model compute in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from fedlens.core import Tree
from fedlens.network.ops import normalise


class Model(Protocol):
    """A model of C clients in training, as a function of their parameters and buffers."""

    @property
    def takes_steps(self) -> bool:
        """Whether layers update their weights in the backward pass and return no gradients."""
        ...

    def __call__(self, params: Tree, buffers: Tree, *given: Tensor) -> tuple[Tensor, Tree]:
        """(params[C], buffers[C], images[C, B], keys[C], mask[C, B]) -> logits[C, B, L], buffers"""
        ...

    def features(self, params: Tree, buffers: Tree, *given: Tensor) -> tuple[Tensor, Tensor, Tree]:
        """The same with the features [C, B, ...], the inputs of the last linear layer, second."""
        ...

    def normalise(self, images: Tensor) -> Tensor:
        """Images [..., channels, H, W] as the first layer expects them.

        The model normalises images of bytes itself; a caller may do it earlier, for many at once.
        """
        ...


@dataclass(frozen=True)
class Numerics:
    """How images are normalised, and in which dtypes tensors are stored and multiplied."""

    mean: Sequence[float] | None
    std: Sequence[float] | None
    dtype: torch.dtype  # of the stored parameters
    compute: torch.dtype  # of the multiplications
    uncast: frozenset[str]  # tensors of layers with running statistics: they stay in `dtype`

    def normalise(self, images: Tensor) -> Tensor:
        return normalise(images, self.mean, self.std, self.compute)

    def cast(self, tensors: Tree) -> Tree:
        """The tensors in the dtype of the multiplications."""
        if self.compute is self.dtype:
            return tensors
        return {n: t if n in self.uncast else t.to(self.compute) for n, t in tensors.items()}


@dataclass(frozen=True)
class Constants:
    """The frozen tensors of a model, copied once to each device and cast there."""

    tensors: Tree
    numerics: Numerics
    _copies: dict[torch.device, Tree] = field(default_factory=dict, repr=False, compare=False)

    def on(self, device: torch.device) -> Tree:
        if device not in self._copies:
            there = {name: t.to(device) for name, t in self.tensors.items()}
            self._copies[device] = self.numerics.cast(there)
        return self._copies[device]
