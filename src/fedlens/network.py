"""A module as a function of its parameters, its buffers, its inputs and a key."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from fedlens.augment import normalise
from fedlens.core import Tree
from fedlens.layers import prepare, side_inputs
from fedlens.layout import Layout


class Network:
    """Fedlens' view of a model: the module holds the code, never the weights of a run.

    `dtype` is what parameters are kept in; `compute`, if given, what they are multiplied in.
    """

    def __init__(
        self,
        module: nn.Module,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        dtype: torch.dtype = torch.float32,
        compute: torch.dtype | None = None,
    ) -> None:
        self.layout = Layout.of(module)
        self.module = prepare(module).to(dtype)
        self.keyed, self.masked = side_inputs(self.module)
        self.mean, self.std = mean, std
        self.dtype, self.compute = dtype, compute or dtype

    @property
    def params(self) -> Tree:
        """The initial parameters, as the module was made."""
        return {name: p.detach().clone() for name, p in self.module.named_parameters()}

    @property
    def buffers(self) -> Tree:
        given = {*self.keyed, *self.masked}
        named = self.module.named_buffers()
        return {name: b.detach().clone() for name, b in named if name not in given}

    @property
    def num_parameters(self) -> int:
        return sum(p.numel() for p in self.module.parameters())

    def one(
        self, params: Tree, buffers: Tree, images: Tensor, keys: Tensor, mask: Tensor
    ) -> tuple[Tensor, Tree]:
        """One client (C = 1), whose batch holds no padding: the plain module."""
        lone = {name: t.squeeze(0) for name, t in (params | buffers).items()}
        # Of one example alone PyTorch's BatchNorm makes an error, the masked one does not.
        padding = mask.squeeze(0) if mask.shape[1] == 1 else mask.new_empty(0)
        logits = self._call(lone, images.squeeze(0), keys.squeeze(0), padding, True)
        return logits.unsqueeze(0), buffers

    def stacked(
        self, params: Tree, buffers: Tree, images: Tensor, keys: Tensor, mask: Tensor
    ) -> tuple[Tensor, Tree]:
        """C clients at once, whatever the module is made of."""

        def each(p: Tree, b: Tree, x: Tensor, k: Tensor, m: Tensor) -> tuple[Tensor, Tree]:
            return self._call(p | b, x, k, m, True), b

        logits, moved = vmap(each)(params, buffers, images, keys, mask)
        return logits, moved

    def predict(self, params: Tree, buffers: Tree, images: Tensor) -> Tensor:
        """The logits [B, L] of a model that is not being trained."""
        none = torch.zeros((), dtype=torch.int64, device=images.device)
        with torch.no_grad():
            return self._call(params | buffers, images, none, images.new_empty(0), False)

    def _call(
        self, tensors: Tree, images: Tensor, key: Tensor, mask: Tensor, training: bool
    ) -> Tensor:
        if self.module.training is not training:
            self.module.train(training)
        if self.compute is not self.dtype:
            tensors = {
                name: t.to(self.compute) if t.is_floating_point() else t
                for name, t in tensors.items()
            }
        side = dict.fromkeys(self.keyed, key) | dict.fromkeys(self.masked, mask)
        inputs = normalise(images, self.mean, self.std, self.compute)
        logits: Tensor = functional_call(self.module, tensors | side, (inputs,))
        return logits.to(self.dtype)
