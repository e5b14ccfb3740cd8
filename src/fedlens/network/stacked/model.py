"""A model of C clients at once: layer by layer if its module can be traced, else by vmap."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.func import vmap

from fedlens.core import Tree
from fedlens.network.functional import FunctionalModule, TrainingMode
from fedlens.network.model import Constants, Numerics
from fedlens.network.stacked.reader import StackedModule


@dataclass(frozen=True)
class LayeredModel:
    """C clients, layer by layer."""

    module: StackedModule
    mode: TrainingMode
    numerics: Numerics
    constants: Constants
    takes_steps: ClassVar[bool] = False

    def __call__(
        self, params: Tree, buffers: Tree, images: Tensor, keys: Tensor, mask: Tensor
    ) -> tuple[Tensor, Tree]:
        return self._logits(params | buffers, images, keys, mask, training=True), buffers

    def normalise(self, images: Tensor) -> Tensor:
        return self.numerics.normalise(images)

    def predict(self, tensors: Tree, images: Tensor) -> Tensor:
        """(parameters and buffers [C], images [C, B]) -> the logits [C, B, L] in evaluation."""
        key = torch.zeros(len(images), dtype=torch.int64, device=images.device)
        mask = torch.ones(images.shape[:2], device=images.device)
        return self._logits(tensors, images, key, mask, training=False)

    def _logits(
        self, tensors: Tree, images: Tensor, keys: Tensor, mask: Tensor, *, training: bool
    ) -> Tensor:
        self.mode.set(training)
        frozen = self.constants.on(images.device)
        same = {name: t.expand(len(keys), *t.shape) for name, t in frozen.items()}
        inputs = self.normalise(images)
        return self.module(tensors | same, self.numerics.cast, inputs, keys, mask)


@dataclass(frozen=True)
class MappedModel:
    """C clients, by vmap of the whole module over them."""

    module: FunctionalModule
    takes_steps: ClassVar[bool] = False

    def __call__(
        self, params: Tree, buffers: Tree, images: Tensor, keys: Tensor, mask: Tensor
    ) -> tuple[Tensor, Tree]:
        def each(p: Tree, b: Tree, x: Tensor, k: Tensor, m: Tensor) -> tuple[Tensor, Tree]:
            return self.module(p | b, x, k, m, training=True), b

        logits, moved = vmap(each)(params, buffers, self.normalise(images), keys, mask)
        return logits, moved

    def normalise(self, images: Tensor) -> Tensor:
        return self.module.numerics.normalise(images)
