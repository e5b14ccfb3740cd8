"""The forms in which engines run a model: one client at a time, or many at once.

The interface of a model in training, and the dtypes that all forms of a model compute in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn
from torch.func import vmap

from fedlens.core import Tree
from fedlens.network.layers import side_inputs
from fedlens.network.ops import normalise
from fedlens.network.single.layers import FastLayer, FastPath, on_fast_path
from fedlens.network.stacked.layers import Activations, Form, LayerInput, Run, StackedModule


class FunctionalModule:
    """`torch.func.functional_call` of one module, with the place of each tensor looked up once.

    It also works under `torch.func.vmap`.
    """

    def __init__(
        self, module: nn.Module, numerics: Numerics, constants: Constants, last: str | None
    ) -> None:
        self.module, self.numerics, self.constants = module, numerics, constants
        self.last = last  # the linear layer whose inputs are the features
        self.keyed, self.masked = side_inputs(module)
        self.mode, self._slots = TrainingMode(module), _slots(module)

    def __call__(
        self, tensors: Tree, inputs: Tensor, key: Tensor, mask: Tensor, *, training: bool
    ) -> Tensor:
        """(parameters and buffers, normalised images [B], key [], mask [B]) -> logits [B, L]"""
        self.mode.set(training)
        side = dict.fromkeys(self.keyed, key) | dict.fromkeys(self.masked, mask)
        every = self.numerics.cast(tensors) | self.constants.on(inputs.device) | side
        for name, tensor in every.items():
            for holder, attribute in self._slots[name]:
                holder[attribute] = tensor
        logits = self.module(inputs)
        if not isinstance(logits, Tensor):
            raise ValueError(
                f"the model gives a {type(logits).__name__}: let it return its outputs alone, "
                "a tensor [images, classes]"
            )
        return logits.to(self.numerics.dtype)

    def features(
        self, tensors: Tree, inputs: Tensor, key: Tensor, mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The same in training, with the features [B, ...]."""
        seen: list[Tensor] = []
        layer = self.module.get_submodule(known(self.last))
        hook = layer.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
        try:
            logits = self(tensors, inputs, key, mask, training=True)
        finally:
            hook.remove()
        known(self.last if seen else None)
        return logits, seen[-1]


def known(last: str | None) -> str:
    if last is None:
        raise ValueError(
            "the model calls no linear layer whose inputs could be its features: choose another "
            "model, or an algorithm that reads no features"
        )
    return last


class TrainingMode:
    """Switches a module between training and evaluation; frozen layers stay in evaluation."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._frozen = [layer for layer in module.modules() if is_frozen(layer)]

    def set(self, training: bool) -> None:
        if self.module.training is not training:
            self.module.train(training)
            for layer in self._frozen:
                layer.eval()


def is_frozen(layer: nn.Module) -> bool:
    """Whether a layer has parameters of its own, and none of them is trained."""
    own = list(layer.parameters(recurse=False))
    return bool(own) and not any(p.requires_grad for p in own)


Slots = dict[str, list[tuple[dict[str, Any], str]]]


def _slots(module: nn.Module) -> Slots:
    """The layers' dicts that hold each parameter and buffer; a shared tensor is in several."""
    names = {id(t): name for name, t in (*module.named_parameters(), *module.named_buffers())}
    slots: Slots = {name: [] for name in names.values()}
    for part in module.modules():
        holders: tuple[dict[str, Any], ...] = (part._parameters, part._buffers)
        for holder in holders:
            for attribute, tensor in holder.items():
                if tensor is not None:
                    slots[names[id(tensor)]].append((holder, attribute))
    return slots


@dataclass(frozen=True)
class SingleModel:
    """One client (C = 1) whose batch has no padding."""

    module: FunctionalModule
    layers: tuple[FastLayer, ...] = ()  # the layers of `module` with a fast path
    fast: FastPath | None = None  # the path that they take, if any

    @property
    def takes_steps(self) -> bool:
        return self.fast is not None and self.fast.lr is not None

    def __call__(self, params: Tree, buffers: Tree, *given: Tensor) -> tuple[Tensor, Tree]:
        with on_fast_path(self.layers, self.fast):
            logits = self.module(*self._given(params | buffers, *given), training=True)
        return logits.unsqueeze(0), buffers

    def features(self, params: Tree, buffers: Tree, *given: Tensor) -> tuple[Tensor, Tensor, Tree]:
        with on_fast_path(self.layers, self.fast):
            logits, seen = self.module.features(*self._given(params | buffers, *given))
        return logits.unsqueeze(0), seen.unsqueeze(0), buffers

    def _given(
        self, tensors: Tree, images: Tensor, keys: Tensor, mask: Tensor
    ) -> tuple[Tree, Tensor, Tensor, Tensor]:
        # For a single example PyTorch's BatchNorm raises an error; the masked form does not.
        padding = mask.squeeze(0) if mask.shape[1] == 1 else mask.new_empty(0)
        inputs = channels_last(self.normalise(images.squeeze(0)))
        own = {name: t.squeeze(0) for name, t in tensors.items()}
        return own, inputs, keys.squeeze(0), padding

    def normalise(self, images: Tensor) -> Tensor:
        return self.module.numerics.normalise(images)


def channels_last(images: Tensor) -> Tensor:
    """The same images in channels-last layout, in which convolutions on a CPU are fastest."""
    _, channels, height, width = images.shape
    if channels > 1:
        return images.contiguous(memory_format=torch.channels_last)
    # With one channel both layouts are the same bytes: the strides tell PyTorch which one it is.
    return images.contiguous().as_strided(images.shape, (height * width, 1, width, 1))


@dataclass(frozen=True)
class LayeredModel:
    """C clients, layer by layer."""

    module: StackedModule
    mode: TrainingMode
    numerics: Numerics
    constants: Constants
    last: str | None
    takes_steps: ClassVar[bool] = False

    def __call__(self, params: Tree, buffers: Tree, *given: Tensor) -> tuple[Tensor, Tree]:
        return self.logits(params | buffers, *given, training=True), buffers

    def features(self, params: Tree, buffers: Tree, *given: Tensor) -> tuple[Tensor, Tensor, Tree]:
        seen: list[Tensor] = []
        last = known(self.last)

        def run(form: Form, layer: nn.Module, x: Activations, inputs: LayerInput) -> Activations:
            if inputs.name == last:
                seen.append(x.by_client())
            return form(layer, x, inputs)

        logits = self.logits(params | buffers, *given, training=True, run=run)
        known(last if seen else None)
        return logits, seen[-1], buffers

    def normalise(self, images: Tensor) -> Tensor:
        return self.numerics.normalise(images)

    def predict(self, tensors: Tree, images: Tensor) -> Tensor:
        """(parameters and buffers [C], images [C, B]) -> the logits [C, B, L] in evaluation."""
        key = torch.zeros(len(images), dtype=torch.int64, device=images.device)
        mask = torch.ones(images.shape[:2], device=images.device)
        return self.logits(tensors, images, key, mask, training=False)

    def logits(
        self,
        tensors: Tree,
        images: Tensor,
        keys: Tensor,
        mask: Tensor,
        *,
        training: bool,
        run: Run = Form.__call__,
    ) -> Tensor:
        self.mode.set(training)
        frozen = self.constants.on(images.device)
        same = {name: t.expand(len(keys), *t.shape) for name, t in frozen.items()}
        inputs = self.normalise(images)
        return self.module(tensors | same, self.numerics.cast, inputs, keys, mask, run)


@dataclass(frozen=True)
class MappedModel:
    """C clients, by vmap of the whole module over them."""

    module: FunctionalModule
    takes_steps: ClassVar[bool] = False

    def __call__(self, params: Tree, buffers: Tree, *given: Tensor) -> tuple[Tensor, Tree]:
        def each(p: Tree, b: Tree, *given: Tensor) -> tuple[Tensor, Tree]:
            return self.module(p | b, *given, training=True), b

        images, *rest = given
        logits, moved = vmap(each)(params, buffers, self.normalise(images), *rest)
        return logits, moved

    def features(self, params: Tree, buffers: Tree, *given: Tensor) -> tuple[Tensor, Tensor, Tree]:
        def each(p: Tree, b: Tree, *given: Tensor) -> tuple[Tensor, Tensor, Tree]:
            return *self.module.features(p | b, *given), b

        images, *rest = given
        logits, seen, moved = vmap(each)(params, buffers, self.normalise(images), *rest)
        return logits, seen, moved

    def normalise(self, images: Tensor) -> Tensor:
        return self.module.numerics.normalise(images)


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
