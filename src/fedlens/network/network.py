"""A module as a function of its parameters, its buffers, its inputs and a key."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vmap

from fedlens.core import Tree, tree_map
from fedlens.network.layers import prepare, side_inputs
from fedlens.network.layout import Layout
from fedlens.network.normalise import normalise
from fedlens.network.single import winograd
from fedlens.network.single.layers import FusedConvolution, Hurry, Linear, fuse
from fedlens.network.stacked.reader import stack


class Network:
    """Fedlens' view of a model: the module holds the code, never the weights of a run.

    `dtype` is what parameters are kept in; `compute`, if given, what they are multiplied in.
    A parameter that does not require a gradient is frozen, and so are the buffers of a layer all
    of whose parameters are: they are constants of the module, neither trained nor sent.
    """

    def __init__(
        self,
        module: nn.Module,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        dtype: torch.dtype = torch.float32,
        compute: torch.dtype | None = None,
    ) -> None:
        layout = Layout.of(module)
        self.module = prepare(module).to(dtype).eval()
        self.keyed, self.masked = side_inputs(self.module)
        given = {*self.keyed, *self.masked}
        resting = [m for m in self.module.modules() if _is_frozen(m)]
        constant = {id(b) for m in resting for b in m.buffers(recurse=False)}
        self._params: Tree = {}
        self._buffers: Tree = {}
        self._frozen: Tree = {}
        for name, p in self.module.named_parameters():
            (self._params if p.requires_grad else self._frozen)[name] = p.detach().clone()
        for name, b in self.module.named_buffers():
            if name not in given:
                (self._frozen if id(b) in constant else self._buffers)[name] = b.detach().clone()
        moving = {name: e for name, e in layout.entries.items() if name not in self._frozen}
        self.layout = replace(layout, entries=moving)
        self._constants: dict[torch.device, Tree] = {}
        self.mean, self.std = mean, std
        self.dtype, self.compute = dtype, compute or dtype
        tracking = {e.layer for e in layout.entries.values() if e.role == "buffer"}
        self._uncast = {name for name, e in layout.entries.items() if e.layer in tracking}
        self._stacking = stack(self.module.train())  # it is read as it is trained
        self._alone = fuse(self.module, self._stacking.nodes) if self._stacking else self.module
        self._places = _places(self._alone)
        self._hurrying = [
            m for m in self._alone.modules() if isinstance(m, FusedConvolution | Linear)
        ]
        self._by_rows = {
            f"{name}.weight"
            for name, m in self._alone.named_modules()
            if isinstance(m, FusedConvolution) and m.weight.shape[2] in winograd.POINTS
        }
        self._resting = resting + [m for m in self._alone.modules() if _is_frozen(m)]
        self._set_mode(training=False)

    @property
    def params(self) -> Tree:
        """The initial parameters, as the module was made."""
        return tree_map(torch.clone, self._params)

    @property
    def buffers(self) -> Tree:
        return tree_map(torch.clone, self._buffers)

    @property
    def frozen(self) -> Tree:
        """The rest of the model: what never changes."""
        return tree_map(torch.clone, self._frozen)

    @property
    def num_parameters(self) -> int:
        """How many are trained."""
        return sum(p.numel() for p in self._params.values())

    def one(
        self, params: Tree, buffers: Tree, images: Tensor, keys: Tensor, mask: Tensor
    ) -> tuple[Tensor, Tree]:
        """One client (C = 1), whose batch holds no padding: the plain module."""
        return self.hurried(params, buffers, images, keys, mask, None)

    def hurried(
        self,
        params: Tree,
        buffers: Tree,
        images: Tensor,
        keys: Tensor,
        mask: Tensor,
        hurry: Hurry | None,
    ) -> tuple[Tensor, Tree]:
        """The same, faster, and rounded differently."""
        lone = {name: t.squeeze(0) for name, t in (params | buffers).items()}
        # Of one example alone PyTorch's BatchNorm makes an error, the masked one does not.
        padding = mask.squeeze(0) if mask.shape[1] == 1 else mask.new_empty(0)
        inputs = _channels_last(self._normalised(images.squeeze(0)))
        with self._in_a(hurry if self.compute is self.dtype else None):
            logits = self._call(lone, inputs, keys.squeeze(0), padding, training=True)
        return logits.unsqueeze(0), buffers

    def stacked(
        self, params: Tree, buffers: Tree, images: Tensor, keys: Tensor, mask: Tensor
    ) -> tuple[Tensor, Tree]:
        """C clients at once: layer by layer if the module can be read so, else by vmap."""
        inputs = self._normalised(images)
        if self._stacking is not None:
            self._set_mode(training=True)
            frozen = self._frozen_on(images.device)
            same = {name: t.expand(len(keys), *t.shape) for name, t in frozen.items()}
            tensors = params | buffers | same
            return self._stacking(tensors, self._cast, inputs, keys, mask), buffers

        def each(p: Tree, b: Tree, x: Tensor, k: Tensor, m: Tensor) -> tuple[Tensor, Tree]:
            return self._call(p | b, x, k, m, training=True), b

        logits, moved = vmap(each)(params, buffers, inputs, keys, mask)
        return logits, moved

    def takes_rows(self, layer: str) -> bool:
        """Whether `stacked` reads the layer, at one place, as one over rows, and trains it."""
        known = self._stacking is not None and self._stacking.takes_rows(layer)
        return known and f"{layer}.weight" in self._params

    def flattened_channels(self, layer: str) -> int | None:
        """How many channels the images have that `stacked` flattens for this layer alone."""
        return self._stacking.flattened_channels(layer) if self._stacking else None

    def laid_out(self, params: Tree) -> Tree:
        """The same parameters [G, ...], kernels in memory as [G, h, w, channels, out]."""
        if self._stacking is None:
            return params
        return {
            name: p.permute(0, 3, 4, 2, 1).contiguous().permute(0, 4, 3, 1, 2) if p.ndim == 5 else p
            for name, p in params.items()
        }

    def laid_out_alone(self, params: Tree) -> Tree:
        """The same parameters [G, ...], kernels in memory as `hurried` reads them."""
        return {
            name: winograd.laid_out(p) if name in self._by_rows else p for name, p in params.items()
        }

    def predict(self, params: Tree, buffers: Tree, images: Tensor) -> Tensor:
        """The logits [B, L] of a model that is not being trained."""
        none = torch.zeros((), dtype=torch.int64, device=images.device)
        with torch.no_grad():
            inputs = _channels_last(self._normalised(images))
            return self._call(params | buffers, inputs, none, inputs.new_empty(0), training=False)

    def _normalised(self, images: Tensor) -> Tensor:
        return normalise(images, self.mean, self.std, self.compute)

    def _call(
        self, tensors: Tree, inputs: Tensor, key: Tensor, mask: Tensor, *, training: bool
    ) -> Tensor:
        self._set_mode(training)
        tensors = self._cast(tensors)
        if self._frozen:
            tensors = tensors | self._frozen_on(inputs.device)
        side = dict.fromkeys(self.keyed, key) | dict.fromkeys(self.masked, mask)
        # As torch.func.functional_call does, but the places are looked up once, not every time.
        for name, tensor in (tensors | side).items():
            for holder, key_in_it in self._places[name]:
                holder[key_in_it] = tensor
        logits = self._alone(inputs)
        if not isinstance(logits, Tensor):
            raise ValueError(
                f"the model gives a {type(logits).__name__}: let it return its outputs alone, "
                "a tensor [images, classes]"
            )
        return logits.to(self.dtype)

    @contextmanager
    def _in_a(self, hurry: Hurry | None) -> Iterator[None]:
        for layer in self._hurrying:
            layer.hurry = hurry
        try:
            yield
        finally:
            for layer in self._hurrying:
                layer.hurry = None

    def _set_mode(self, training: bool) -> None:
        if self.module.training is not training:
            self.module.train(training)
            self._alone.train(training)
            for layer in self._resting:
                layer.eval()

    def _cast(self, tensors: Tree) -> Tree:
        """In the dtype to multiply in; layers with running statistics stay in their own."""
        if self.compute is self.dtype:
            return tensors
        return {n: t if n in self._uncast else t.to(self.compute) for n, t in tensors.items()}

    def _frozen_on(self, device: torch.device) -> Tree:
        if device not in self._constants:
            there = {name: t.to(device) for name, t in self._frozen.items()}
            self._constants[device] = self._cast(there)
        return self._constants[device]


def _is_frozen(layer: nn.Module) -> bool:
    own = list(layer.parameters(recurse=False))
    return bool(own) and not any(p.requires_grad for p in own)


def _channels_last(images: Tensor) -> Tensor:
    """The same images in the layout that convolutions on a CPU are fastest in."""
    _, channels, height, width = images.shape
    if channels > 1:
        return images.contiguous(memory_format=torch.channels_last)
    # With one channel both layouts are the same bytes: the strides tell torch which is meant.
    return images.contiguous().as_strided(images.shape, (height * width, 1, width, 1))


Places = dict[str, list[tuple[dict[str, Any], str]]]


def _places(module: nn.Module) -> Places:
    """Where each parameter and buffer is held; one that is shared is held at several places."""
    names = {id(t): name for name, t in (*module.named_parameters(), *module.named_buffers())}
    places: Places = {name: [] for name in names.values()}
    for part in module.modules():
        holders: tuple[dict[str, Any], ...] = (part._parameters, part._buffers)
        for holder in holders:
            for key, tensor in holder.items():
                if tensor is not None:
                    places[names[id(tensor)]].append((holder, key))
    return places
